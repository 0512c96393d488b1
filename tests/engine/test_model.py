"""The decoder against transformers on the same weights, float32, and refusals by name.

Tolerance: logits within 2e-4 of transformers' where they span about +-20 (tiny) and +-30 (the real one); the 64
greedy tokens equal.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file
from tiny import Judge, make_tiny, save_gguf, save_tiny

from forebay.catalog import ModelFiles
from forebay.config import EngineSettings
from forebay.contract import Unsupported
from forebay.engine.kv.capacity import pages_of
from forebay.engine.loop import Engine
from forebay.engine.model.linear import Packed, Plain, make_linear
from forebay.engine.runner import ModelRunner, build
from forebay.engine.sequence import GenSpec, Sequence
from forebay.engine.step import Step, Work

TOLERANCE = 2e-4


def last_logits(runner: ModelRunner, ids: list[int]) -> torch.Tensor:
    seq = Sequence.of(GenSpec(1, ids, 1), 0)
    seq.table = list(range(pages_of(len(ids))))
    return runner.logits(Step((Work(seq, 0, len(ids), samples=True),)))[0]


def greedy(engine: Engine, ids: list[int], n: int) -> list[int]:
    return [token for emit in engine.generate([GenSpec(1, ids, n)])[1] for token in emit.tokens]


def prompt(n: int, vocab: int = 199) -> list[int]:
    return [(i * i * 31 + 7 * i + 3) % vocab for i in range(n)]


def build_float32(files: ModelFiles, kernels: str = "auto") -> ModelRunner:
    settings = {"dtype": "float32", "device": "cpu", "kv_memory": 2**26, "kernels": kernels}
    return build(files, EngineSettings.model_validate(settings)).runner


@pytest.mark.parametrize("kernels", ["auto", "off"])
@pytest.mark.parametrize("n", [1, 17, 100])
def test_prefill_logits_are_those_of_transformers(tiny: tuple[ModelFiles, Judge], n: int, kernels: str) -> None:
    files, judge = tiny
    ours, theirs = last_logits(build_float32(files, kernels), prompt(n)), judge.logits(prompt(n))[-1]
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)


def test_64_greedy_tokens_are_those_of_transformers(
    tiny: tuple[ModelFiles, Judge], engine_of: Callable[..., Engine]
) -> None:
    files, judge = tiny
    assert greedy(engine_of(files), prompt(40), 64) == judge.greedy(prompt(40), 64)


@pytest.mark.parametrize("kind", [GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.Q8_0])
@pytest.mark.parametrize("name", ["gqa", "tied"])
def test_gguf_with_permuted_rows(kind: GGMLQuantizationType, name: str, tmp_path: Path) -> None:
    model = make_tiny(name)
    files = save_gguf(model, tmp_path / "tiny.gguf", kind)
    ours, theirs = last_logits(build_float32(files), prompt(50)), Judge(model).logits(prompt(50))[-1]
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)


def test_real_model_logits_and_64_greedy_tokens(
    demo_model: ModelFiles, demo_transformers: Judge, engine_of: Callable[..., Engine]
) -> None:
    ids = prompt(300, 49152)
    ours, theirs = last_logits(build_float32(demo_model), ids), demo_transformers.logits(ids)[-1]
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)
    # <|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n
    question = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
    assert greedy(engine_of(demo_model), question, 64) == demo_transformers.greedy(question, 64)


def test_bfloat16_is_close(plain: tuple[ModelFiles, Judge]) -> None:
    """Tolerance for bfloat16: 0.5 on logits that span +-20, the size of its rounding over three layers."""
    files, judge = plain
    runner = build(files, EngineSettings(dtype="bfloat16", device="cpu", kv_memory=2**26)).runner
    difference = (last_logits(runner, prompt(60)) - judge.logits(prompt(60))[-1]).abs().max()
    assert 0 < difference < 0.5


@pytest.mark.parametrize("rows", [1, 3, 16, 70])
def test_packed_and_plain_linear_agree(rows: int) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(96, 64), torch.randn(rows, 64)
    plain, packed = Plain(weight)(x), Packed(weight)(x)
    torch.testing.assert_close(packed, plain, atol=1e-4, rtol=0)
    torch.testing.assert_close(plain, (x.double() @ weight.double().T).float(), atol=1e-4, rtol=0)


def test_without_the_packed_form_the_plain_one_serves(
    plain: tuple[ModelFiles, Judge], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("not on this CPU")

    monkeypatch.setattr(Packed, "__init__", refuse)
    assert isinstance(make_linear(torch.ones(2, 2)), Plain)
    files, judge = plain
    torch.testing.assert_close(
        last_logits(build_float32(files), prompt(40)), judge.logits(prompt(40))[-1], atol=TOLERANCE, rtol=0
    )


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}, "mamba"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "KV heads"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, object], named: str, tmp_path: Path) -> None:
    files, _ = save_tiny("gqa", tmp_path)
    edit_config(tmp_path, **changes)
    (tmp_path / "model.safetensors").write_bytes(b"never read")
    with pytest.raises(Unsupported, match=named):
        build_float32(files)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.pop("model.norm.weight"), "'model.norm.weight' is missing"),
        (lambda t: t.pop("lm_head.weight"), "'lm_head.weight' is missing"),
        (lambda t: t.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(16)}), "q_norm"),
        (lambda t: t.update({"model.norm.weight": torch.ones(63)}), "model.norm.weight"),
    ],
)
def test_tensors_are_checked_by_name(change: Callable[[dict], object], named: str, tmp_path: Path) -> None:
    files, _ = save_tiny("gqa", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(Unsupported, match=named):
        build_float32(files)


def test_a_broken_weights_file_is_a_clear_error(tmp_path: Path) -> None:
    files, _ = save_tiny("gqa", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(Unsupported, match=r"model\.safetensors"):
        build_float32(files)
