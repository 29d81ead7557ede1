from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_deepinfer.checkpoint.encoding import decode_bf16, dequantize_fp8, dequantize_mxfp4
from vllm_deepinfer.checkpoint.layout import ENCODINGS, Encoding, expected_tensors
from vllm_deepinfer.checkpoint.tensors import Entry, Kind, entries
from vllm_deepinfer.checkpoint.weights import random_values, standard_noise, stored_arrays, stored_headers

from .samples import text_config


def test_the_same_values_everywhere() -> None:
    """Computed from raw integers by correctly rounded operations alone."""
    values = random_values("layers.0.attn.wkv.weight", Entry((3, 4)), 0)
    assert (
        hashlib.sha256(values.tobytes()).hexdigest()
        == "28975274ad89d02965917f937bbdb1955c91b84cbcfa944d7c85969637bd9a6c"
    )


def by_hand(count: int, seed: int, name: str) -> list[float]:
    """Four 16-bit numbers of each raw 64-bit draw, added up, centred and scaled, in Python integers."""
    from zlib import crc32

    stream = np.random.PCG64(np.random.SeedSequence([seed, crc32(name.encode())]))
    sums = []
    for _ in range(count):
        raw = int(stream.random_raw())
        sums.append(sum((raw >> shift) & 0xFFFF for shift in (0, 16, 32, 48)))
    deviation = (4 * ((2**16) ** 2 - 1) / 12) ** 0.5  # of four discrete uniform numbers
    return [(total - 2 * 65535) / deviation for total in sums]


@given(shape=st.lists(st.integers(1, 5), max_size=3), seed=st.integers(0, 10), name=st.text(max_size=5))
def test_noise_by_hand(shape: list[int], seed: int, name: str) -> None:
    noise = standard_noise(tuple(shape), seed=seed, name=name)
    assert noise.shape == tuple(shape)
    assert noise.ravel().tolist() == by_hand(noise.size, seed, name)


def test_noise_is_bell_shaped() -> None:
    noise = standard_noise((200_000,), seed=1, name="x")
    assert abs(noise.mean()) < 0.01
    assert abs(noise.std() - 1) < 0.01
    within = [float((np.abs(noise) < limit).mean()) for limit in (1, 2, 3)]
    assert within == pytest.approx([0.683, 0.954, 0.997], abs=0.02)


def test_values_depend_on_name_and_seed() -> None:
    entry = Entry((64, 64))
    values = [random_values(name, entry, seed) for name in ("a.weight", "b.weight") for seed in (0, 1)]
    for left in range(4):
        for right in range(left):
            assert abs(np.corrcoef(values[left].ravel(), values[right].ravel())[0, 1]) < 0.1


@pytest.mark.parametrize(
    ("name", "shape", "mean", "deviation"),
    [
        ("layers.0.attn_norm.weight", (4096,), 1, 0.2),
        ("layers.0.attn.q_norm.weight", (4096,), 1, 0.2),
        ("layers.2.attn.compressor.norm.weight", (4096,), 1, 0.2),
        ("layers.2.attn.indexer.k_norm.weight", (4096,), 1, 0.2),
        ("norm.weight", (4096,), 1, 0.2),
        ("mtp.0.main_norm.weight", (4096,), 1, 0.2),
        ("layers.1.engram.q_weight", (4, 1024), 1, 0.2),
        ("layers.0.attn.attn_sink", (4096,), 0, 0.3),
        ("layers.0.hc_attn_base", (4096,), 0, 0.3),
        ("layers.0.hc_ffn_scale", (4096,), 1, 0.3),
        ("layers.0.hc_ffn_fn", (24, 1024), 0, 1 / 32),
        ("layers.0.ffn.gate.bias", (4096,), 0, 0.1),
        ("layers.0.ffn.gate.bias_vl", (4096,), 0, 0.1),
        ("layers.0.ffn.gate.weight", (64, 64), 0, 1 / 8),
        ("embed.weight", (64, 64), 0, 1),
        ("layers.1.engram.embed.weight", (64, 64), 0, 1),
        ("mtp.2.markov_head.embed.weight", (64, 64), 0, 1),
        ("mtp.2.markov_head.head.weight", (64, 64), 0, 1 / 8),
        ("head.weight", (64, 64), 0, 4 / 8),
        ("layers.0.ffn.experts.3.w2.weight", (256, 16), 0, 1 / 4),
        ("layers.0.attn.wo_a.weight", (64, 64), 0, 1 / 8),
    ],
)
def test_sizes_of_values(name: str, shape: tuple[int, ...], mean: float, deviation: float) -> None:
    values = random_values(name, Entry(shape), 0)
    assert values.dtype == np.float32
    assert abs(values.mean() - mean) < 0.1 * max(deviation, 0.2)
    assert values.std() == pytest.approx(deviation, rel=0.1)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_headers_are_those_of_the_layout(encoding: Encoding) -> None:
    config = text_config()
    specs = expected_tensors(config, encoding=encoding)
    written = {
        name: header
        for entry_name, entry in entries(config)
        for name, header in stored_headers(entry_name, entry, encoding).items()
    }
    assert {name: header.shape for name, header in written.items()} == {
        name: spec.shape for name, spec in specs.items()
    }
    assert all(written[name].dtype in spec.dtypes for name, spec in specs.items())


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("kind", Kind)
def test_arrays_are_those_of_the_headers(encoding: Encoding, kind: Kind) -> None:
    entry = Entry((8, 64), kind)
    values = random_values("a.b.weight", entry, 0)
    arrays = dict(stored_arrays("a.b.weight", entry, encoding, values))
    headers = stored_headers("a.b.weight", entry, encoding)
    assert list(arrays) == list(headers)
    for name, array in arrays.items():
        assert (array.shape, array.nbytes) == (headers[name].shape, headers[name].nbytes)


@pytest.mark.parametrize(
    ("encoding", "kind", "dtypes"),
    [
        ("released", Kind.DENSE, ["F8_E4M3", "F8_E8M0"]),
        ("released", Kind.ROWS, ["F8_E4M3", "F8_E8M0"]),
        ("released", Kind.EXPERT, ["I8", "F8_E8M0"]),
        ("released", Kind.PLAIN, ["BF16"]),
        ("released", Kind.EXACT, ["F32"]),
        ("bf16", Kind.DENSE, ["BF16"]),
        ("bf16", Kind.EXACT, ["F32"]),
        ("fp32", Kind.EXPERT, ["F32"]),
        ("fp32", Kind.PLAIN, ["F32"]),
    ],
)
def test_types(encoding: Encoding, kind: Kind, dtypes: list[str]) -> None:
    headers = stored_headers("a.weight", Entry((32, 32), kind), encoding)
    assert [header.dtype for header in headers.values()] == dtypes


@pytest.mark.parametrize(("kind", "error"), [(Kind.DENSE, 2**-4), (Kind.ROWS, 2**-4), (Kind.EXPERT, 2**-2)])
def test_quantised_values_are_close(kind: Kind, error: float) -> None:
    """Within half a step of the format, of a value or of the block's largest."""
    entry = Entry((64, 96), kind)
    values = random_values("a.weight", entry, 0)
    weight, scale = (array for _, array in stored_arrays("a.weight", entry, "released", values))
    restored = dequantize_mxfp4(weight, scale) if kind is Kind.EXPERT else dequantize_fp8(weight, scale)
    assert np.abs(restored - values).max() <= error * np.abs(values).max()
    assert np.corrcoef(restored.ravel(), values.ravel())[0, 1] > 0.99


def test_bf16_values_are_close() -> None:
    entry = Entry((64, 96))
    values = random_values("a.weight", entry, 0)
    ((_, codes),) = stored_arrays("a.weight", entry, "bf16", values)
    assert np.abs(decode_bf16(codes) - values).max() <= 2**-8 * np.abs(values).max()
