"""Profiles of engines: how long a step takes on some machine, and what it holds. For ``--engine simulated:PROFILE``.

They are JSON files in profiles/, one per name.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from ..config import EngineSettings, SettingsError

FOLDER = Path(__file__).parent / "profiles"


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A step takes ``base`` seconds, and ``decode`` for each sequence that generates in it, and ``prefill`` for each
    token of a prompt, and ``attention`` for each token before that one. ``arithmetic`` says, line by line, where the
    numbers are from; ``estimate``: nobody has measured them."""

    name: str
    estimate: bool
    arithmetic: list[str]
    base: float
    decode: float
    prefill: float
    max_batch: int
    token_budget: int
    n_pages: int
    attention: float = 0.0

    def seconds(self, decodes: int, prefill: int = 0, before: int = 0) -> float:
        """What a step takes. ``before``: the sum, over its tokens of prompts, of the tokens before each."""
        return self.base + self.decode * decodes + self.prefill * prefill + self.attention * before


def names() -> list[str]:
    """Of the profiles that there are."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def profile_of(settings: EngineSettings) -> Profile | None:
    """The one that the setting ``engine`` names; None where it asks for the model. Raises SettingsError."""
    kind, _, name = settings.engine.partition(":")
    if kind == "model":
        return None
    if name not in names():
        raise SettingsError(f"engine: there is no profile {name!r}, only {', '.join(names())}", param="engine")
    return msgspec.json.decode((FOLDER / f"{name}.json").read_bytes(), type=Profile)


def with_profile(settings: EngineSettings) -> EngineSettings:
    """The settings with the profile's sizes where nobody has said others. Raises SettingsError."""
    profile = profile_of(settings)
    if profile is None:
        return settings
    sizes = {"max_batch": profile.max_batch, "token_budget": profile.token_budget}
    settings = settings.model_copy(
        update={name: size for name, size in sizes.items() if name not in settings.model_fields_set}
    )
    if settings.token_budget < settings.max_batch:
        raise SettingsError(
            f"token_budget ({settings.token_budget}) must be at least max_batch ({settings.max_batch}), as the profile "
            f"{profile.name} has it where you do not say",
            param="token_budget",
        )
    return settings
