"""Quantization: the codes, the packed form, the kernels against torch, and law 9 bit for bit in every combination."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from hypothesis import given, settings
from test_engine import every_path, prompt
from tiny import Judge, make_tiny, save_gguf

from forebay.catalog import ModelFiles, resolve
from forebay.config import EngineSettings
from forebay.engine import kernels
from forebay.engine.batch import Batch
from forebay.engine.kernels.hadamard import spread
from forebay.engine.kv.capacity import pages_of
from forebay.engine.model import store
from forebay.engine.model.quant import (
    Bits,
    Codes,
    Packed,
    QuantLinear,
    fake_quantize,
    from_gguf,
    join,
    linear,
    quantize,
)
from forebay.engine.runner import Built, build
from forebay.engine.sequence import GenSpec, Sequence
from forebay.engine.step import Step, Work

compiled = pytest.mark.skipif(kernels.library() is None, reason="the kernels were not built (no compiler)")


@pytest.fixture(params=list(kernels.LEVELS.values()), scope="module")
def each_level(request: pytest.FixtureRequest) -> Iterator[None]:
    """The linear layers on each instruction set that this CPU has."""
    lib = kernels.library()
    if lib is None:
        pytest.skip("the kernels were not built (no compiler)")
    wanted = next(n for n, name in kernels.LEVELS.items() if name == request.param)
    if lib.forebay_level(wanted) != wanted:
        lib.forebay_level(max(kernels.LEVELS))
        pytest.skip(f"this CPU has no {request.param}")
    yield
    lib.forebay_level(max(kernels.LEVELS))


def weights(n: int, k: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, k)).astype(np.float32)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("n", "k"), [(16, 32), (48, 64), (37, 96), (50, 40), (1, 32)])
def test_packing_loses_nothing(bits: Literal[4, 8], n: int, k: int) -> None:
    w = weights(n, k)
    codes = quantize(w, bits)
    scale = np.repeat(codes.scale.astype(np.float32), 32, axis=1)
    offset = np.repeat(codes.offset.astype(np.float32), 32, axis=1)
    values = codes.codes.astype(np.float32)
    if bits == 8:
        blocks = values.reshape(-1, 8, 4)  # each fourth value of a group
        values = np.einsum("gij,ik->gkj", blocks, hadamard(8) / 8).reshape(values.shape).astype(np.float32)
    plain = (values * scale + offset)[:, :k]
    packed = Packed.of(codes, k)
    np.testing.assert_array_equal(packed.dequantize().numpy(), plain)
    order = torch.tensor([n - 1, 0, n // 2])
    np.testing.assert_array_equal(packed.rows(order).numpy(), plain[order])
    # Half a step, and what float16 rounds of scale and offset.
    assert np.abs(plain - w).max() <= 0.51 * scale[:, :k].max() + 0.003
    if bits == 8:  # and spread, the errors of 8 codes are one eighth of their sum
        assert np.sqrt(np.mean((plain - w) ** 2)) <= 0.35 * scale.max() / 8**0.5


def test_a_transform_and_its_matrix() -> None:
    x = torch.from_numpy(weights(3, 64))
    for block in (8, 16, 64):
        expected = (x.double().view(3, -1, block) @ torch.from_numpy(hadamard(block))).view(3, 64)
        torch.testing.assert_close(spread(x, block).double(), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_4_bits_fit_into_8_that_are_spread(kind: str) -> None:
    codes = from_gguf(quants.quantize(weights(24, 96), GGMLQuantizationType[kind]), kind)
    assert codes is not None
    wide = codes.widened()
    assert wide.bits == 8
    assert wide.widened() is wide
    theirs = Packed.of(codes, 96).dequantize()
    torch.testing.assert_close(
        Packed.of(wide, 96).dequantize(), theirs, atol=2e-3 * float(codes.scale.max()) * 8, rtol=0
    )


def hadamard(n: int) -> np.ndarray:
    """Sylvester's matrix, +1 and -1."""
    h = np.ones((1, 1))
    while len(h) < n:
        h = np.block([[h, h], [h, -h]])
    return h


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_codes_of_a_gguf_are_those_of_the_file(kind: str) -> None:
    w = weights(24, 96)
    blocks = quants.quantize(w, GGMLQuantizationType[kind])
    codes = from_gguf(blocks, kind)
    assert codes is not None
    theirs = quants.dequantize(blocks, GGMLQuantizationType[kind])
    np.testing.assert_allclose(Packed.of(codes, 96).dequantize().numpy(), theirs, atol=1e-6)
    assert from_gguf(blocks, "Q8_0") is None
    assert from_gguf(blocks, "Q4_K") is None


def test_rows_in_another_order_and_below_each_other() -> None:
    a, b = quantize(weights(8, 64, 1), 4), quantize(weights(24, 64, 2), 4)
    order = np.arange(8)[::-1]
    both = Packed.of(join([a.rows(order), b]), 64).dequantize()
    torch.testing.assert_close(both[:8], Packed.of(a, 64).dequantize().flip(0), atol=0, rtol=0)
    torch.testing.assert_close(both[8:], Packed.of(b, 64).dequantize(), atol=0, rtol=0)


shapes = st.tuples(
    st.sampled_from([4, 8]),
    st.integers(1, 70),
    st.sampled_from([8, 32, 40, 96, 576]),
    st.integers(1, 19),
    st.integers(0, 99),
)


@settings(max_examples=60, deadline=None)
@given(shape=shapes)
def test_kernels_equal_torch(each_level: None, shape: tuple[Bits, int, int, int, int]) -> None:
    bits, n, k, rows, seed = shape
    packed = Packed.of(quantize(weights(n, k, seed), bits), k)
    x = torch.from_numpy(weights(rows, k, seed + 1))
    x[0] = 0
    ours = linear(packed, x)
    torch.testing.assert_close(ours, QuantLinear(packed, torch.float32)(x), atol=2e-5, rtol=2e-5)
    # Law 9: a row alone gives the same bits.
    for row in range(rows):
        assert torch.equal(linear(packed, x[row : row + 1])[0], ours[row])


@pytest.mark.parametrize(("bits", "code"), [(4, 15), (4, 0), (8, 127), (8, -128)])
@pytest.mark.parametrize("alternating", [False, True])
def test_extreme_codes_do_not_overflow(each_level: None, bits: Bits, code: int, alternating: bool) -> None:
    """The largest sums that there can be, in both signs: 16 bits are just enough. 4-bit codes are spread: all the same
    give the largest sum, and half of them 0 the largest difference."""
    codes = np.full((16, 64), code, dtype=np.int8)
    if alternating:
        codes.reshape(16, 2, 8, 4)[:, :, 1::2] = 0
    ones = np.ones((16, 2), dtype=np.float16)
    packed = Packed.of(Codes(codes, ones, 0 * ones, bits), 64)
    x = torch.zeros(5, 64)
    x.view(5, 2, 8, 4)[:, :, 0] = 127.0  # becomes 127 everywhere when it is spread
    x[1:3] *= -1
    expected = x.double() @ packed.dequantize().double().T
    assert torch.equal(linear(packed, x).double(), expected)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_what_is_broken_stays_broken_in_its_row(each_level: None, broken: float, bits: Bits) -> None:
    packed = Packed.of(quantize(weights(20, 64), bits), 64)
    x = torch.from_numpy(weights(3, 64))
    x[1, 40] = broken
    for out in (linear(packed, x), QuantLinear(packed, torch.float32)(x)):
        assert out[1].isnan().all()
        assert out[[0, 2]].isfinite().all()


def test_activations_in_8_bits() -> None:
    x = torch.from_numpy(weights(5, 70))
    x[2, :32] = 0
    assert (fake_quantize(x) - x).square().mean().sqrt() < 0.01
    assert not fake_quantize(x)[2, :32].any()
    x[:, 5] = 40  # one large value would leave the rest of its group steps of 40 / 127
    assert (fake_quantize(x)[:, 6:32] - x[:, 6:32]).square().mean().sqrt() < 40 / 127 / 12**0.5 / 2
    assert (fake_quantize(x)[:, 32:] - x[:, 32:]).square().mean().sqrt() < 0.01


COMBINATIONS = list(itertools.product(["none", "int8", "int4"], ["model", "int8"], ["auto", "off"]))


def built_as(files: ModelFiles, quantize: str, kv: str, use: str, **more: object) -> Built:
    chosen = {"quantize": quantize, "kv_dtype": kv, "kernels": use, "dtype": "float32", "device": "cpu"}
    return build(files, EngineSettings.model_validate({**chosen, "kv_memory": 2**27, **more}))


def logits_of(built: Built, ids: list[int], cuts: list[int], crowd: int, first_page: int) -> torch.Tensor:
    """Logits of every position [n, vocab], computed in chunks that end at ``cuts`` beside ``crowd`` other prompts."""
    width = pages_of(len(ids)) + 1
    found = []
    for start, end in itertools.pairwise([0, *cuts, len(ids)]):
        works = []
        for i in range(crowd + 1):
            own = ids if i == crowd else prompt(len(ids), i, built.spec.vocab_size)
            seq = Sequence.of(GenSpec(i, own[:end], 1), 0)
            seq.table = [first_page + i * width + page for page in range(pages_of(end))]
            works.append(Work(seq, start, end - start, samples=True))
        step = Step(tuple(works))
        rows = Batch.of(step).q_start
        logits = built.runner.logits(step, every_row=True).clone()
        found.append(logits[rows[crowd] : rows[crowd + 1]])
    return torch.cat(found)


@pytest.mark.parametrize(("mode", "kv", "use"), COMBINATIONS)
def test_law_9_in_every_combination(plain: tuple[ModelFiles, Judge], mode: str, kv: str, use: str) -> None:
    """Chunked, decoded, in a crowd: bit for bit where the program runs, within rounding where torch multiplies."""
    built = built_as(plain[0], mode, kv, use)
    ids = prompt(330)
    whole = logits_of(built, ids, [], 0, 0)
    chunked = logits_of(built, ids, [16, 61, 62, 63, 300, 329], 0, 40)
    crowd = logits_of(built, ids, [100, 250, 251, 252], 3, 80)
    program = mode != "none" and use == "auto" and kernels.library() is not None
    assert built.summary["kernels"].startswith("compiled (") is program
    for other in (chunked, crowd):
        if program:
            assert torch.equal(other, whole)
        else:
            # A rounding that falls to the other side moves an activation by 1/127 of its group.
            tight = mode == "none" and kv == "model"
            torch.testing.assert_close(other, whole, atol=1e-4 if tight else 0.3, rtol=1e-4)


@compiled
@pytest.mark.parametrize(("mode", "kv"), [("int8", "int8"), ("int4", "int8"), ("int4", "model"), ("none", "int8")])
def test_the_engine_answers_the_same_on_every_path(plain: tuple[ModelFiles, Judge], mode: str, kv: str) -> None:
    found = every_path(built_as(plain[0], mode, kv, "auto"), prompt(150), 48)
    assert len(set(map(tuple, found.values()))) == 1, found


def off_by(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize(("mode", "kv"), list(itertools.product(["none", "int8", "int4"], ["model", "int8"])))
def test_no_combination_loses_the_model(tiny: tuple[ModelFiles, Judge], mode: str, kv: str) -> None:
    """Against transformers in float32, and the kernels against torch. (Random weights amplify every rounding; what a
    real model loses is in its verdict.)"""
    files, judge = tiny
    ids = prompt(90)
    fast, slow = (logits_of(built_as(files, mode, kv, use), ids, [40], 0, 0) for use in ("auto", "off"))
    limits = {"none": 0.08 if kv == "int8" else 1e-5, "int8": 0.16, "int4": 0.85}
    assert off_by(fast, judge.logits(ids)) < limits[mode]
    assert off_by(fast, slow) < (1e-5 if (mode, kv) == ("none", "model") else 0.04)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
@pytest.mark.parametrize("use", ["auto", "off"])
def test_a_quantized_gguf_is_taken_as_it_is(tmp_path: Path, kind: str, use: str) -> None:
    """No second loss: only the activations are rounded, so the logits are nearer than 4 bits once more would be."""
    model = make_tiny("gqa")
    files = save_gguf(model, tmp_path / "tiny.gguf", GGMLQuantizationType[kind])
    ids = prompt(60)
    ours = logits_of(built_as(files, "int4", "model", use), ids, [], 0, 0)
    theirs = Judge(model).logits(ids)
    assert off_by(ours, theirs) < 0.16


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize(("mode", "kv"), [("int8", "model"), ("int4", "int8")])
def test_a_gpu_computes_what_torch_does_on_the_cpu(plain: tuple[ModelFiles, Judge], mode: str, kv: str) -> None:
    ids = prompt(90)
    gpu = logits_of(built_as(plain[0], mode, kv, "off", device="cuda"), ids, [40], 0, 0).cpu()
    assert off_by(gpu, logits_of(built_as(plain[0], mode, kv, "off"), ids, [40], 0, 0)) < 0.05


def test_converted_weights_are_kept_and_taken_again(
    plain: tuple[ModelFiles, Judge], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = resolve(str(plain[0].path), tmp_path)
    assert files.cache is not None
    first = built_as(files, "int4", "model", "auto")
    assert "converted from the model's file" in first.summary["weights"]
    entry = files.cache / "weights-int4.safetensors"
    assert entry.is_file()
    ids = prompt(40)
    logits = logits_of(first, ids, [], 0, 0)

    def never(*_: object) -> None:
        raise AssertionError("converted again")

    with monkeypatch.context() as patch:
        patch.setattr("forebay.engine.model.weights.open_source", never)
        again = built_as(files, "int4", "model", "auto")
        assert torch.equal(logits_of(again, ids, [], 0, 0), logits)
        assert "earlier start" in again.summary["weights"]
    # Damaged, or of other code: made anew.
    for damage in (
        lambda data: data[:-7],
        lambda data: b"",
        lambda data: data.replace(store.VERSION.encode(), b"x" * 8),
    ):
        entry.write_bytes(damage(entry.read_bytes()))
        assert torch.equal(logits_of(built_as(files, "int4", "model", "auto"), ids, [], 0, 0), logits)
        assert store.load(entry) is not None
