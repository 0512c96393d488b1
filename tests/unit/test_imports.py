"""The walls between the rooms."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]


def test_the_direction_of_imports() -> None:
    lint = [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()"]
    result = subprocess.run([*lint, "--no-cache"], cwd=_ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert " 0 broken" in result.stdout


@pytest.mark.parametrize(
    "modules",
    [
        "forebay.cli, forebay.commands.serve, forebay.commands.chat",
        "forebay.bench.load, forebay.bench.report, forebay.bench.versus",
    ],
)
def test_the_front_has_no_torch(modules: str) -> None:
    """Law of the first wall: not even through a library that would import it on the side."""
    ask = f"import sys, {modules}; print(sorted(m for m in sys.modules if m.split('.')[0] == 'torch'))"
    assert subprocess.check_output([sys.executable, "-c", ask], text=True).strip() == "[]"
