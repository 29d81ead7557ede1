"""Rotary embedding against plain cosines and sines, and YaRN against its definition pair by pair."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from vllm_deepinfer_plugins.model.rope import Rotary, rotate

from .samples import noise, text_config

YARN = {"rope_type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1}
YARN["original_max_position_embeddings"] = 65536


def angles(*, compressed: bool, position: int = 1, **changes: Any) -> list[float]:
    """What `Rotary` turns each pair by; below π at position 1, so that the angle is the frequency."""
    rotary = Rotary(text_config(**changes), compressed=compressed)
    return [float(angle) for angle in rotary(torch.tensor([position])).angle()[0]]


def yarn(dim: int, theta: float, factor: float, length: int, fast: float, slow: float) -> list[float]:
    """Frequencies by YaRN's definition (arXiv 2309.00071, section 3.2), one pair at a time."""

    def pair_of(turns: float) -> float:
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(pair_of(fast)), 0), min(math.ceil(pair_of(slow)), dim - 1)
    frequencies = []
    for pair in range(dim // 2):
        plain = theta ** (-2 * pair / dim)
        share = min(max((pair - low) / max(high - low, 1e-3), 0), 1)
        frequencies.append(plain / factor * share + plain * (1 - share))
    return frequencies


def test_pairs_are_turned_by_cosine_and_sine() -> None:
    values, positions = noise(5, 3, 20), torch.tensor([0, 1, 7, 100, 4000])
    config = text_config(qk_rope_head_dim=8)
    turned = rotate(values, Rotary(config, compressed=False)(positions))
    for token, position in enumerate(positions.tolist()):
        for head in range(3):
            row = values[token, head].double().tolist()
            wanted = row[:12]
            for pair in range(4):
                a, b = row[12 + 2 * pair : 14 + 2 * pair]
                angle = position * config.rope_theta ** (-2 * pair / 8)
                wanted += [
                    a * math.cos(angle) - b * math.sin(angle),
                    a * math.sin(angle) + b * math.cos(angle),
                ]
            assert turned[token, head].tolist() == pytest.approx(wanted, abs=2e-3 if position > 100 else 1e-5)


def test_rows_without_heads() -> None:
    values, rotations = noise(6, 32), Rotary(text_config(), compressed=True)(torch.arange(6))
    assert torch.equal(rotate(values, rotations), rotate(values.unsqueeze(1), rotations).squeeze(1))


def test_position_zero_turns_nothing() -> None:
    values = noise(1, 4, 32)
    assert torch.equal(rotate(values, Rotary(text_config(), compressed=True)(torch.tensor([0]))), values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_inverse_undoes(dtype: torch.dtype) -> None:
    values, rotations = (
        noise(9, 2, 32, dtype=dtype),
        Rotary(text_config(), compressed=True)(torch.arange(9) * 50),
    )
    back = rotate(rotate(values, rotations), rotations, inverse=True)
    assert back.dtype == dtype
    torch.testing.assert_close(back, values, atol=1e-5 if dtype == torch.float32 else 0.05, rtol=0)
    assert torch.equal(back[..., :16], values[..., :16]), "channels outside the rotation pass"


def test_scores_depend_on_the_distance_alone() -> None:
    query, key = noise(1, 16, seed=1), noise(1, 16, seed=2)
    rotary = Rotary(text_config(), compressed=False)
    products = [
        float((rotate(query, rotary(torch.tensor([at + 5]))) * rotate(key, rotary(torch.tensor([at])))).sum())
        for at in (0, 1, 63, 500)
    ]
    assert products == pytest.approx([products[0]] * 4, abs=1e-4)


def test_the_layers_of_the_window_alone_use_rope_theta_without_yarn() -> None:
    plain = [10000 ** (-2 * pair / 16) for pair in range(8)]
    assert angles(compressed=False) == pytest.approx(plain)
    assert angles(compressed=False, compress_rope_theta=5.0) == pytest.approx(plain)
    assert angles(compressed=False, rope_theta=100.0) == pytest.approx([100 ** (-p / 8) for p in range(8)])


def test_the_compressed_path_uses_its_own_theta_with_yarn() -> None:
    wanted = yarn(64, 160000, 16, 65536, 32, 1)
    sizes: dict[str, Any] = {"head_dim": 64, "index_head_dim": 64, "qk_rope_head_dim": 64}
    found = angles(compressed=True, rope_scaling=YARN, **sizes)
    assert found == pytest.approx(wanted)
    assert angles(compressed=True, rope_scaling=YARN, rope_theta=7.0, **sizes) == found


def test_yarn_at_both_ends() -> None:
    """The fastest pairs keep their frequency, the slowest are stretched by the whole factor."""
    sizes: dict[str, Any] = {"head_dim": 64, "index_head_dim": 64, "qk_rope_head_dim": 64}
    found = angles(compressed=True, rope_scaling=YARN, **sizes)
    plain = [160000 ** (-2 * pair / 64) for pair in range(32)]
    stretch = [before / after for before, after in zip(plain, found, strict=True)]
    assert stretch[:15] == pytest.approx([1] * 15)
    assert stretch[-6:] == pytest.approx([16] * 6)
    ramp = [round(value, 3) for value in stretch]
    assert ramp == sorted(ramp) and len(set(ramp)) > 8, "in between it grows"


@pytest.mark.parametrize(
    ("length", "fast", "slow"), [(256, 32, 1), (1, 32, 1), (4096, 4, 4), (1 << 20, 64, 2)]
)
def test_yarn_of_any_length(length: int, fast: float, slow: float) -> None:
    scaling = {"rope_type": "yarn", "factor": 8, "beta_fast": fast, "beta_slow": slow}
    scaling["original_max_position_embeddings"] = length
    assert angles(compressed=True, rope_scaling=scaling) == pytest.approx(
        yarn(16, 160000, 8, length, fast, slow)
    )


def test_betas_default_to_yarns_own() -> None:
    scaling = {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536}
    assert angles(compressed=True, rope_scaling=scaling) == angles(compressed=True, rope_scaling=YARN)


@pytest.mark.parametrize("extra", [{}, {"factor": 16, "original_max_position_embeddings": 256}])
def test_no_scaling(extra: dict[str, int]) -> None:
    found = angles(compressed=True, rope_scaling={"rope_type": "default", **extra})
    assert found == pytest.approx([160000 ** (-2 * pair / 16) for pair in range(8)])


def test_frequencies_ignore_the_modules_dtype() -> None:
    positions = torch.arange(100_000, 100_010)
    wanted = Rotary(text_config(), compressed=True)(positions)
    assert torch.equal(Rotary(text_config(), compressed=True).to(torch.bfloat16)(positions), wanted)
    assert wanted.dtype == torch.complex64
