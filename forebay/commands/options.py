"""Command line options made from the settings themselves: name, type, description and default have one source."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import click

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

_METAVARS: dict[Any, str] = {int: "INTEGER", float: "NUMBER", int | float: "SIZE", Path: "PATH", bool: "true|false"}


class SettingsCommand(click.Command):
    """A command with ``--config`` and one option per setting (all but ``model``, or those named in ``only``).

    Values stay strings: ``config.load`` is what checks them, wherever they come from. The options are made when
    they are first asked for, because the settings are slow to import.
    """

    def __init__(self, *args: Any, only: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._only = only

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return [*self._setting_options, *super().get_params(ctx)]

    @functools.cached_property
    def _setting_options(self) -> list[click.Parameter]:
        from ..config import ROOMS  # noqa: PLC0415

        fields = {name: field for room in ROOMS.values() for name, field in room.model_fields.items()}
        names = self._only or [name for name in fields if name != "model"]
        config = click.Option(
            ["--config"],
            type=click.Path(path_type=Path),
            envvar="FOREBAY_CONFIG",
            show_envvar=True,
            metavar="FILE",
            help="Settings file; forebay.toml in the current folder where it exists.",
        )
        return [config, *(_option(name, fields[name]) for name in names)]


def _option(name: str, field: FieldInfo) -> click.Option:
    if get_origin(field.annotation) is Literal:
        metavar = f"[{'|'.join(map(str, get_args(field.annotation)))}]"
    else:
        metavar = _METAVARS.get(field.annotation, "TEXT")
    default = "none" if field.default is None else field.default
    return click.Option(
        [f"--{name.replace('_', '-')}"], metavar=metavar, help=f"{field.description} [default: {default}]"
    )
