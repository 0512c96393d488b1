"""`forebay config`: every setting as it would be taken now, and where it was said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pydantic
from rich.console import Console
from rich.table import Table

from ..config import NAMES, Settings

_HIDDEN = "********"


def show(settings: Settings, origins: dict[str, str], *, as_json: bool) -> None:
    """Print to stdout. Secrets are masked; of a key its name, tenant and class are shown."""
    rows: dict[str, tuple[Any, str]] = {
        name: (_shown(getattr(getattr(settings, room), name)), origins.get(name, "default"))
        for name, room in NAMES.items()
    }
    for name, key in settings.keys.items():
        rows[f"keys.{name}"] = {"tenant": key.tenant, "class": key.service_class}, origins["keys"]
    if as_json:
        print(
            json.dumps({name: {"value": value, "origin": origin} for name, (value, origin) in rows.items()}, indent=2)
        )
        return
    table = Table("setting", "value", "origin")
    for name, (value, origin) in rows.items():
        text = "none" if value is None else value if isinstance(value, str) else json.dumps(value)
        table.add_row(name, text, origin, style=None if origin == "default" else "bold")
    Console(markup=False, highlight=False).print(table)


def _shown(value: object) -> object:
    if isinstance(value, pydantic.SecretStr):
        return _HIDDEN
    return str(value) if isinstance(value, Path) else value
