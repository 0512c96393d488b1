"""Law 10: what decides reads no clock, no random source and no environment, except through an argument."""

import ast
from pathlib import Path

import pytest

import forebay

ROOT = Path(forebay.__file__).parent
PURE = [
    ROOT / "engine" / "sequence.py",
    ROOT / "engine" / "scheduler.py",
    ROOT / "engine" / "step.py",
    ROOT / "engine" / "join.py",
    ROOT / "engine" / "pace.py",
    ROOT / "engine" / "batch.py",
    ROOT / "engine" / "sample.py",
    *sorted((ROOT / "engine" / "kv").glob("*.py")),
    *sorted((ROOT / "engine" / "attention").glob("*.py")),
    *sorted((ROOT / "engine" / "model").glob("*.py")),
    *sorted((ROOT / "admission").glob("*.py")),
]
IMPURE = {"time", "datetime", "random", "secrets", "os", "uuid", "psutil", "socket", "subprocess", "threading"}
#: The gate names time.monotonic as the default of its clock argument, and asyncio's timers wake its waiters. What keeps
#: converted weights writes them to disk safely (fsync).
ALLOWED = {"gate.py": {"time", "random"}, "store.py": {"os"}}


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


ENGINE = sorted((ROOT / "engine").rglob("*.py"))
#: Who may write what: attributes of a Sequence, and the two calls that change the scheduler's mind.
WRITERS = {"scheduler.py", "sequence.py"}
SEQUENCE = {"computed", "table", "inserted", "node", "cached", "started", "preempted", "cancelled", "state"}


@pytest.mark.parametrize("path", ENGINE, ids=lambda path: str(path.relative_to(ROOT)))
def test_law_2_only_the_loop_and_its_scheduler_touch_engine_state(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            if isinstance(target, ast.Attribute) and ast.unparse(target.value).split(".")[-1] in {"seq", "sequence"}:
                assert path.name in WRITERS or target.attr not in SEQUENCE, ast.unparse(node)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in {"plan", "commit"}:
                assert path.name == "loop.py", ast.unparse(node)
            if node.func.attr in {"take", "share", "drop", "keep", "forget"}:
                assert path.parent.name == "kv" or path.name == "scheduler.py", ast.unparse(node)


#: Law 11, as far as there is anything to unpickle: these never appear.
LOADERS = ("pickle", "marshal", "shelve", "dill", "yaml")


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_law_11_nothing_is_unpickled_or_evaluated(path: Path) -> None:
    assert not imported(path) & set(LOADERS)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            assert ast.unparse(node.func) not in {"eval", "exec", "torch.load", "numpy.load", "np.load"}
