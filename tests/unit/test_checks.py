"""The table of faults (tests/checks.toml) names tests that exist, and has every line of its list."""

import ast
import tomllib
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
TABLE = tomllib.loads((TESTS / "checks.toml").read_text())
#: How many faults each section of the list has.
LINES = {"A": 9, "B": 5, "C": 5, "D": 10, "E": 10, "F": 5}


def names_in(file: Path) -> set[str]:
    found = ast.walk(ast.parse(file.read_text()))
    return {node.name for node in found if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_line_is_there() -> None:
    assert {section: len(lines) for section, lines in TABLE.items()} == LINES


@pytest.mark.parametrize(
    "entry", [entry for lines in TABLE.values() for entry in lines], ids=lambda entry: entry["seen"].replace(" ", "")
)
def test_it_has_tests_that_exist_and_a_guard(entry: dict[str, str | list[str]]) -> None:
    assert entry.keys() == {"seen", "fault", "guard", "tests"}
    assert all(entry.values())
    for name in entry["tests"]:
        file, test = name.split("::")
        assert file.rpartition("/")[2].startswith("test_")
        known = {found for found in names_in(TESTS / file) if found.startswith("test_")}
        assert known if test == "*" else test in known, name
