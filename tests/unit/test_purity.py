"""Law 10: what decides reads no clock, no random source and no environment, except through an argument."""

import ast
from pathlib import Path

import pytest

import forebay

ROOT = Path(forebay.__file__).parent
PURE = [
    ROOT / "engine" / "sequence.py",
    ROOT / "engine" / "scheduler.py",
    ROOT / "engine" / "batch.py",
    ROOT / "engine" / "sample.py",
    *sorted((ROOT / "engine" / "kv").glob("*.py")),
    *sorted((ROOT / "engine" / "attention").glob("*.py")),
    *sorted((ROOT / "engine" / "model").glob("*.py")),
    *sorted((ROOT / "admission").glob("*.py")),
]
IMPURE = {"time", "datetime", "random", "secrets", "os", "uuid", "psutil", "socket", "subprocess", "threading"}
#: The gate names time.monotonic as the default of its clock argument, and asyncio's timers wake its waiters.
ALLOWED = {"gate.py": {"time"}}


def imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add((node.module or "").split(".")[0])
    return found


@pytest.mark.parametrize("path", PURE, ids=lambda path: str(path.relative_to(ROOT)))
def test_law_10_no_impure_imports(path: Path) -> None:
    assert imported(path) & IMPURE <= ALLOWED.get(path.name, set())


def test_the_gate_calls_its_clock_and_no_other() -> None:
    tree = ast.parse((ROOT / "admission" / "gate.py").read_text())
    uses = [n for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id == "time"]
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func).startswith("time.")]
    assert len(uses) == 1
    assert not calls


#: Law 11, as far as there is anything to unpickle: these never appear.
LOADERS = ("pickle", "marshal", "shelve", "dill", "yaml")


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_law_11_nothing_is_unpickled_or_evaluated(path: Path) -> None:
    assert not imported(path) & set(LOADERS)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            assert ast.unparse(node.func) not in {"eval", "exec", "torch.load", "numpy.load", "np.load"}
