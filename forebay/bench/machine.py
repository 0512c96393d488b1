"""What the numbers were measured on."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    """CPU, cores, instruction set and versions."""
    # In a process of its own: torch's threads and memory have no place in the client that measures.
    ask = "import torch; print(torch.__version__, torch.backends.cpu.get_cpu_capability())"
    answer = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    torch, capability = answer.stdout.split()
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "instruction_set": capability,
        "torch": torch,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def told(facts: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in facts.items())
