"""`forebay cache`: the answer cache of a server that runs."""

from __future__ import annotations

import aiohttp
import msgspec

from ..bench.client import Endpoint, Unreachable, reason


async def purge(endpoint: Endpoint) -> int:
    """Have the server forget the answers of the key's tenant; returns how many. Raises Unreachable."""
    try:
        async with (
            endpoint.session() as session,
            session.delete(f"{endpoint.base}/cache", timeout=aiohttp.ClientTimeout(total=30)) as response,
        ):
            body = await response.read()
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        raise Unreachable(f"no server answers at {endpoint.url} ({error})") from None
    if response.status != 200:
        raise Unreachable(f"{endpoint.base}/cache: {reason(response.status, body)}")
    try:
        return int(msgspec.json.decode(body)["purged"])
    except (msgspec.DecodeError, LookupError, TypeError, ValueError):
        raise Unreachable(f"{endpoint.base}/cache does not say what it purged; is this Forebay?") from None
