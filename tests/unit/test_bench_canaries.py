"""The campaign of canaries sees what it is for: what it says of a sound server is in tests/server."""

from __future__ import annotations

from typing import Any

from forebay.bench.canaries import TENANTS, Campaign, key_of, keys_file
from forebay.bench.client import Endpoint


def campaign() -> Campaign:
    return Campaign(Endpoint("http://127.0.0.1:1"), 3, 1, "seed")


def told(text: str) -> dict[str, Any]:
    details = {"tier": "disk"}
    return {"output": [{"content": [{"text": text}]}], "usage": {"input_tokens_details": details}}


def test_anothers_code_is_a_fault_and_ones_own_is_not() -> None:
    one = campaign()
    codes = one.codes
    assert len(set(codes)) == 3
    one.look(1, told(f"The secret code is {codes[1]}."))
    assert (one.seen.turns, one.seen.own_code, one.seen.faults) == (1, 1, [])
    one.look(1, told(f"The secret code is {codes[2]}."))
    assert one.seen.faults == ["session 1 was told the code of 2"]
    assert one.seen.tiers == {"disk": 2}


def test_a_turn_that_is_lost_doubled_or_out_of_order_is_a_fault() -> None:
    for there in (["a", "c"], ["a", "b", "b", "c"], ["b", "a", "c"], []):
        one = campaign()
        one.compare(0, there, ["a", "b", "c"])
        assert len(one.seen.faults) == 1, there
    one = campaign()
    one.compare(0, ["a", "left in the middle", "b", "c"], ["a", "b", "c"])
    assert one.seen.faults == []


def test_both_tenants_have_a_key(tmp_path: Any) -> None:
    text = keys_file(tmp_path).read_text()
    assert all(f'tenant = "{tenant}"' in text for tenant in TENANTS)
    assert key_of(TENANTS[0]) not in text
