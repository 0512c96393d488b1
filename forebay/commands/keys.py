"""`forebay key new`: a key, and what the settings file has to know of it."""

from __future__ import annotations

import secrets

import click
import pydantic

from ..config import KeySettings, Settings, SettingsError
from ..server.auth import key_digest


def new(tenant: str, name: str, service_class: str) -> None:
    """Print a fresh key once, and its line for forebay.toml. Raises SettingsError for a name that is none."""
    key = "fb-" + secrets.token_urlsafe(32)
    entry = {"sha256": key_digest(key.encode()).hex(), "tenant": tenant, "class": service_class}
    try:
        Settings(keys={name: KeySettings.model_validate(entry)})
    except pydantic.ValidationError as error:
        raise SettingsError("names and tenants are 1 to 64 of A-Z a-z 0-9 _ -", param="tenant") from error
    fields = ", ".join(f'{field} = "{value}"' for field, value in entry.items())
    click.echo(f"The key, which is shown only now:\n\n{key}\n")
    click.echo(f"Its line in forebay.toml, at the end under [keys]:\n\n{name} = {{ {fields} }}")
