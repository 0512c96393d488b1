"""Families: what each is read as, what is refused by name, and the real Gemma 3 270M against transformers."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file
from test_model import TOLERANCE, build_float32, edit_config, greedy, last_logits, prompt
from test_quant import built_as, compiled, logits_of, off_by
from tiny import FAMILIES, Judge, make_tiny, save_gguf, save_tiny

from forebay.backends.local import LocalBackend
from forebay.catalog import ModelFiles, ModelMeta
from forebay.config import EngineSettings, Settings
from forebay.contract import GenRequest, Unsupported
from forebay.engine import kernels
from forebay.engine.loop import Engine
from forebay.engine.model.families import read_spec

_TEXT = "你好,请问你们的营业时间是什么?How are you?"
_CHINESE = [2, 144626, 236764, 238350, 237889, 35743, 236918, 127818, 11627, 54847, 236881, 3910, 659, 611, 236881]


@pytest.fixture(scope="session")
def gemma_judge(gemma: ModelFiles) -> Judge:
    return Judge.of_gguf(gemma.path)


def test_the_real_gemma_is_that_of_transformers(
    gemma: ModelFiles, gemma_judge: Judge, engine_of: Callable[..., Engine]
) -> None:
    """Chinese, and longer than the window of 512."""
    for ids in (_CHINESE, (_CHINESE * 50)[:600]):
        ours, theirs = last_logits(build_float32(gemma), ids), gemma_judge.logits(ids)[-1]
        torch.testing.assert_close(ours, theirs, atol=5e-4, rtol=0)
    assert greedy(engine_of(gemma), _CHINESE, 48) == gemma_judge.greedy(_CHINESE, 48)


def test_the_real_gemma_by_text(gemma: ModelFiles, gemma_judge: Judge, gemma_spelling: tokenizers.Tokenizer) -> None:
    """From text to text: our tokenizer, engine and detokenizer against those of transformers."""
    answer = gemma_judge.greedy(_CHINESE, 24)

    async def generate() -> tuple[int, str]:
        engine = EngineSettings(dtype="float32", device="cpu", kv_memory=2**27, max_batch=2)
        async with LocalBackend(gemma, Settings(engine=engine)) as backend:
            await backend.wait_ready()
            request = GenRequest(prompt=_TEXT, max_tokens=24, temperature=0.0, ignore_eos=True)
            async with backend.open(await backend.prepare(request)) as deltas:
                got = [delta async for delta in deltas]
            return got[-1].usage.prompt_tokens, "".join(delta.text for delta in got)

    assert [2, *gemma_spelling.encode(_TEXT, add_special_tokens=False).ids] == _CHINESE
    assert asyncio.run(generate()) == (len(_CHINESE), gemma_spelling.decode(answer))


@pytest.mark.parametrize(("mode", "limit"), [("int8", 0.1), ("int4", 0.2)])
def test_the_real_gemma_in_few_bits(gemma: ModelFiles, gemma_judge: Judge, mode: str, limit: float) -> None:
    """The kernels against transformers in float32: K-quants are rounded once more."""
    built = built_as(gemma, mode, "int8", "auto")
    assert built.summary["kernels"].startswith("compiled (") is (kernels.library() is not None)
    ids = (_CHINESE * 50)[:550]
    assert off_by(logits_of(built, ids, [100, 540], 0, 0)[-20:], gemma_judge.logits(ids)[-20:]) < limit


@compiled
@pytest.mark.parametrize("name", list(FAMILIES))
@pytest.mark.parametrize("kv", ["model", "int8"])
def test_law_9_in_every_family(name: str, kv: str, tmp_path: Path) -> None:
    """Bit for bit, whole, chunked, decoded and in a crowd, where windows have long passed the beginning."""
    built = built_as(save_tiny(name, tmp_path)[0], "int8", kv, "auto")
    assert built.summary["kernels"].startswith("compiled (")
    ids = prompt(330)
    whole = logits_of(built, ids, [], 0, 0)
    assert torch.equal(logits_of(built, ids, [16, 61, 62, 300, 329], 0, 40), whole)
    assert torch.equal(logits_of(built, ids, [100, 250, 251], 3, 80), whole)


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "gemma3-cycle", "smollm3"])
def test_a_gguf_of_the_family(name: str, tmp_path: Path) -> None:
    model = make_tiny(name)
    files = save_gguf(model, tmp_path / "tiny.gguf", GGMLQuantizationType.F32)
    ours, theirs = last_logits(build_float32(files), prompt(50)), Judge(model).logits(prompt(50))[-1]
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("gemma3", {"hidden_activation": "relu"}, "hidden_activation"),
        ("gemma3", {"layer_types": ["linear_attention"] * 4}, "linear_attention"),
        ("gemma3", {"layer_types": ["full_attention"] * 3}, "3 layers"),
        ("qwen3", {"attention_bias": True}, "attention_bias"),
        ("qwen2", {"model_type": "qwen2_moe"}, "qwen2_moe"),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 8}, "use_sliding_window"),
    ],
)
def test_what_a_family_cannot_is_refused_by_name(
    name: str, changes: dict[str, object], named: str, tmp_path: Path
) -> None:
    files, _ = save_tiny(name, tmp_path)
    edit_config(tmp_path, **changes)
    (tmp_path / "model.safetensors").write_bytes(b"never read")
    with pytest.raises(Unsupported, match=named):
        build_float32(files)


def test_shards_are_those_of_the_index(tmp_path: Path) -> None:
    files, judge = save_tiny("qwen2-window", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, held in shards.items():
        save_file({name: tensors[name] for name in held}, tmp_path / file)
    # The same weights once more under other names, as some folders have them.
    save_file({"tok_embeddings.weight": torch.ones(2, 2)}, tmp_path / "consolidated.safetensors")
    with pytest.raises(Unsupported, match="tok_embeddings"):
        build_float32(files)
    index = tmp_path / "model.safetensors.index.json"
    where = {name: file for file, held in shards.items() for name in held}
    index.write_text(json.dumps({"weight_map": where}))
    ours, theirs = last_logits(build_float32(files), prompt(60)), judge.logits(prompt(60))[-1]
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)
    for wrong in ("[]", "{", json.dumps({"weight_map": {"x": "../model-1.safetensors"}})):
        index.write_text(wrong)
        with pytest.raises(Unsupported, match=r"index\.json"):
            build_float32(files)


def hf(**raw: object) -> ModelMeta:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 8, "intermediate_size": 96}
    raw = {**sizes, "rms_norm_eps": 1e-6, **raw}
    return ModelMeta(str(raw["model_type"]), 1024, 199, (2,), 1, True, None, raw)


def test_layers_of_older_configs() -> None:
    """Before transformers named the type of each layer."""
    gemma = read_spec(hf(model_type="gemma3_text", sliding_window=512, rope_theta=1e6, rope_local_base_freq=1e4))
    assert gemma.windows == (512,) * 5 + (0,) + (512,) * 2
    assert [layer.rope.theta for layer in gemma.layers if layer.rope] == [1e4] * 5 + [1e6] + [1e4] * 2
    assert gemma.head_dim == 256
    smollm = read_spec(hf(model_type="smollm3", no_rope_layer_interval=4))
    assert [layer.rope is None for layer in smollm.layers] == [False, False, False, True] * 2
    qwen = {"model_type": "qwen2", "sliding_window": 32, "max_window_layers": 6}
    assert read_spec(hf(**qwen)).windows == (0,) * 8
    assert read_spec(hf(**qwen, use_sliding_window=True)).windows == (0,) * 6 + (32,) * 2
    assert read_spec(hf(model_type="mistral", sliding_window=4096)).windows == (4096,) * 8
    assert read_spec(hf(model_type="mistral", sliding_window=None)).windows == (0,) * 8
