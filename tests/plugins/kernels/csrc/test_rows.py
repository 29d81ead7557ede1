"""Norm, rotation, cache rounding, pooling, expert choice and Engram's gate, row by row."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_deepinfer_plugins.kernels import Kernels
from vllm_deepinfer_plugins.model.moe import Router
from vllm_deepinfer_plugins.model.quant import quantize_cache
from vllm_deepinfer_plugins.model.rope import rotate

from ..samples import assert_near, integers, noise
from ..variants import threads

FORMATS: Any = ["fp8", "nvfp4", "mxfp4"]


def turns(tokens: int, pairs: int) -> torch.Tensor:
    angles = noise(tokens, pairs, seed=7, dtype=torch.float32) * 100
    return torch.polar(torch.ones_like(angles), angles)


@pytest.mark.parametrize(("tokens", "size"), [(1, 1), (3, 31), (4, 32), (16, 33), (5, 512), (2, 5120)])
def test_a_norm(kernels: Kernels, tokens: int, size: int) -> None:
    values, weight = noise(tokens, size), noise(size, seed=1)
    wide = values.double()
    wanted = wide / (wide.square().mean(-1, keepdim=True) + 1e-20).sqrt() * weight.double()
    assert_near(kernels.rows(values, norm=weight, eps=1e-20), wanted)


def test_an_eps_below_every_square(kernels: Kernels) -> None:
    tiny = torch.full((1, 32), 1e-12).bfloat16()
    wanted = tiny.double() / (tiny.double().square().mean() + 1e-20).sqrt()
    assert_near(kernels.rows(tiny, norm=torch.ones(32).bfloat16(), eps=1e-20), wanted)
    zero = kernels.rows(torch.zeros(2, 32).bfloat16(), norm=torch.ones(32).bfloat16(), eps=1e-20)
    assert not zero.any()


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("shape", [(1, 32), (7, 20), (3, 1, 64), (5, 4, 32), (2, 5, 48), (9, 8, 16)])
def test_a_rotation_turns_the_last_channels(kernels: Kernels, shape: tuple[int, ...], inverse: bool) -> None:
    values, angles = noise(*shape), turns(shape[0], 8)
    found = kernels.rows(values, turns=angles, inverse=inverse)
    wanted = rotate(values.double().float(), angles, inverse=inverse).double()
    assert torch.equal(found[..., :-16], values[..., :-16])
    assert_near(found, wanted, slack=1e-6)
    strided = angles.T.contiguous().T
    assert torch.equal(kernels.rows(values, turns=strided, inverse=inverse), found)
    kernels.rows(values, turns=angles, inverse=inverse, out=values)
    assert torch.equal(values, found), "in place"


def test_what_does_not_fit_is_refused(kernels: Kernels) -> None:
    for wrong in ({"turns": turns(3, 17)}, {"turns": turns(2, 4)}, {"norm": torch.ones(32)}):
        with pytest.raises(AssertionError):
            kernels.rows(noise(3, 32), **wrong)


def test_rows_into_a_wider_array(kernels: Kernels) -> None:
    target, values = torch.zeros(5, 48).bfloat16(), noise(5, 32)
    kernels.rows(values, fmt="fp8", out=target[:, :32])
    assert torch.equal(target[:, :32], kernels.rows(values, fmt="fp8")) and not target[:, 32:].any()


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("size", [1, 16, 31, 32, 40, 128, 512])
@pytest.mark.parametrize("magnitude", [1e-30, 1e-5, 1.0, 300.0])
def test_cache_rounding_is_exact(kernels: Kernels, fmt: Any, size: int, magnitude: float) -> None:
    values = (noise(9, size, dtype=torch.float32) * magnitude).bfloat16()
    values[0], values[1, 0] = 0, -0.0
    assert torch.equal(kernels.rows(values, fmt=fmt), quantize_cache(values, fmt))


@pytest.mark.parametrize("fmt", FORMATS)
def test_cache_rounding_below_the_smallest_scale(kernels: Kernels, fmt: Any) -> None:
    values = torch.stack([torch.logspace(low, low + 5, 32) for low in (-40, -20, -10, -8, -6)]).bfloat16()
    assert torch.equal(kernels.rows(values, fmt=fmt), quantize_cache(values, fmt))


@given(bits=st.lists(st.integers(-0x4500, 0x4500), min_size=1, max_size=40), fmt=st.sampled_from(FORMATS))
@settings(max_examples=60)
def test_cache_rounding_of_any_bits(kernels: Kernels, bits: list[int], fmt: Any) -> None:
    """Every bfloat16 up to 2,048, as sign and magnitude: subnormals, ties and both zeros among them."""
    signed = [value if value >= 0 else -value - 0x8000 for value in bits]
    values = torch.tensor([signed], dtype=torch.int16).view(torch.bfloat16)
    assert torch.equal(kernels.rows(values, fmt=fmt), quantize_cache(values, fmt))


@pytest.mark.parametrize("fmt", FORMATS)
def test_all_steps_in_their_order(kernels: Kernels, fmt: Any) -> None:
    values, weight, angles = noise(6, 3, 64), noise(64, seed=1), turns(6, 16)
    normal = kernels.rows(values, norm=weight, eps=1e-6)
    turned = kernels.rows(normal, turns=angles)
    found = kernels.rows(values, norm=weight, eps=1e-6, turns=angles, fmt=fmt)
    assert torch.equal(found, quantize_cache(turned, fmt))


@pytest.mark.parametrize("ratio", [1, 2, 4, 8])
@pytest.mark.parametrize(("tokens", "size"), [(1, 16), (3, 33), (17, 64)])
def test_pooling(kernels: Kernels, tokens: int, size: int, ratio: int) -> None:
    group = noise(tokens, ratio, 2 * size, dtype=torch.float32) * 3
    values, gates = group.double().split(size, dim=-1)
    wanted = (values * gates.softmax(dim=1)).sum(1)
    assert_near(kernels.pool(group), wanted)
    assert_near(kernels.pool(group[:, :, :].transpose(0, 1).contiguous().transpose(0, 1)), wanted)


def test_far_gates(kernels: Kernels) -> None:
    group = torch.zeros(1, 2, 2)
    group[0, :, 0], group[0, :, 1] = torch.tensor([3.0, 5.0]), torch.tensor([1e4, -1e4])
    assert float(kernels.pool(group)) == 3.0


def router(hidden: int, experts: int, chosen: int, *, renormalise: bool = True) -> Router:
    config: Any = SimpleNamespace(routed_scaling_factor=1.5, norm_topk_prob=renormalise, hidden_size=hidden)
    made = Router(config, experts, chosen)
    made.weight.data = noise(experts, hidden, seed=1, dtype=torch.float32) * hidden**-0.5
    made.bias.data = noise(experts, seed=2, dtype=torch.float32)
    return made


def route(kernels: Kernels, of: Router, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return kernels.route(x, of.weight, of.bias, of.chosen, of.scale, of.renormalise)


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize(
    ("tokens", "hidden", "experts", "chosen"),
    [(1, 32, 1, 1), (5, 64, 7, 7), (16, 33, 64, 6), (33, 96, 384, 6), (3, 128, 128, 1)],
)
def test_experts_are_chosen_as_by_the_plain_router(
    kernels: Kernels, tokens: int, hidden: int, experts: int, chosen: int, renormalise: bool
) -> None:
    of, x = router(hidden, experts, chosen, renormalise=renormalise), noise(tokens, hidden)
    ids, weights = route(kernels, of, x)
    wanted_ids, wanted = of(x.float(), None)
    assert ids.dtype == torch.int64 and torch.equal(ids, wanted_ids)
    torch.testing.assert_close(weights, wanted, rtol=1e-5, atol=1e-7)


def test_scores_far_out(kernels: Kernels) -> None:
    """softplus of −80, −1, 0, 19.9, 20.1 and 1,000."""
    of = router(32, 6, 6)
    of.weight.data, of.bias.data = torch.zeros(6, 32), torch.zeros(6)
    of.weight.data[:, 0] = torch.tensor([-80.0, -1.0, 0.0, 19.9, 20.1, 1000.0])
    x = torch.eye(1, 32).bfloat16()
    ids, weights = kernels.route(x, of.weight, of.bias, 6, 1.0, False)
    scores = torch.nn.functional.softplus(of.weight[:, 0].double()).sqrt()
    assert ids.tolist() == [[5, 4, 3, 2, 1, 0]]
    torch.testing.assert_close(weights[0].double(), scores.flip(0), rtol=1e-5, atol=1e-20)


def test_of_equal_experts_the_lower(kernels: Kernels) -> None:
    of = router(32, 40, 5)
    of.bias.data = torch.zeros(40)
    of.bias.data[[3, 30, 31]] = 1
    assert route(kernels, of, torch.zeros(2, 32).bfloat16())[0].tolist() == [[3, 30, 31, 0, 1]] * 2
    of.bias.data = torch.full((40,), -torch.inf)
    assert route(kernels, of, torch.zeros(1, 32).bfloat16())[0].tolist() == [[0, 1, 2, 3, 4]]


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_a_poisoned_row_chooses_experts_that_exist(kernels: Kernels, poison: float) -> None:
    of, x = router(64, 16, 6), noise(5, 64)
    clean = route(kernels, of, x)
    x[2, 7] = poison
    ids, weights = route(kernels, of, x)
    assert ((ids >= 0) & (ids < 16)).all() and weights[2].isnan().any()
    others = [0, 1, 3, 4]
    assert torch.equal(ids[others], clean[0][others]) and torch.equal(weights[others], clean[1][others])


@pytest.mark.parametrize(("tokens", "n", "hidden"), [(1, 4, 64), (5, 2, 33), (17, 1, 128), (3, 8, 16)])
def test_engrams_gate(kernels: Kernels, tokens: int, n: int, hidden: int) -> None:
    streams, memory = noise(tokens, n, hidden), noise(tokens, (n + 1) * hidden, seed=1)
    query, key = noise(n, hidden, seed=2), noise(n, hidden, seed=3)
    found = kernels.engram(streams, memory, query, key, 1e-20)
    own, keys = streams.double(), memory.double().unflatten(1, (n + 1, hidden))[:, :n]
    a = own / own.square().mean(-1, keepdim=True).sqrt() * query.double()
    b = keys / keys.square().mean(-1, keepdim=True).sqrt() * key.double()
    match = (a * b).sum(-1) * hidden**-0.5
    gate = torch.sigmoid(match.abs().clamp_min(1e-6).sqrt() * match.sign()).unsqueeze(-1)
    assert_near(found, own + gate * memory.double()[:, None, -hidden:], slack=1e-4)


def test_engram_without_a_match(kernels: Kernels) -> None:
    """Keys of zero: the gate is sigmoid(0.001), a hair above the half that the streams take away again."""
    streams, memory = torch.full((2, 1, 32), -1.5).bfloat16(), torch.full((2, 64), 3.0).bfloat16()
    memory[:, :32] = 0
    found = kernels.engram(streams, memory, noise(1, 32), noise(1, 32), 1e-20)
    wanted = 3 * (torch.sigmoid(torch.tensor(1e-3)) - 0.5)
    torch.testing.assert_close(found.float(), wanted.expand(2, 1, 32), rtol=0.01, atol=0)


def test_a_row_has_the_same_bits_in_any_company(kernels: Kernels) -> None:
    values, weight, angles, group = noise(37, 80), noise(80, seed=1), turns(37, 8), noise(37, 2, 66).float()
    of, streams, memory = router(80, 33, 5), noise(37, 2, 40), noise(37, 120, seed=4)
    gates = noise(2, 40, seed=2), noise(2, 40, seed=3)

    def every(rows: list[int] | slice) -> list[torch.Tensor]:
        return [
            kernels.rows(values[rows], norm=weight, eps=1e-6, turns=angles[rows], fmt="nvfp4"),
            kernels.pool(group[rows]),
            *route(kernels, of, values[rows]),
            kernels.engram(streams[rows], memory[rows], *gates, 1e-6),
        ]

    whole = every(slice(None))
    for rows in ([0], [36], [20, 3, 3, 17], list(range(36, -1, -1))):
        assert all(torch.equal(part, right[rows]) for part, right in zip(every(rows), whole, strict=True))
    with threads(2):
        assert all(torch.equal(part, right) for part, right in zip(every(slice(None)), whole, strict=True))


@pytest.mark.parametrize("fmt", [None, *FORMATS])
def test_poison_ends_and_stays_in_its_row(kernels: Kernels, fmt: Any) -> None:
    values = integers(6, 64, most=3)
    clean = kernels.rows(values, fmt=fmt)
    values[1, 5], values[4, 40] = torch.nan, torch.inf
    found = kernels.rows(values, fmt=fmt)
    assert found[1, 5].isnan() and torch.equal(found[[0, 2, 3, 5]], clean[[0, 2, 3, 5]])


def test_no_tokens(kernels: Kernels) -> None:
    assert kernels.rows(noise(0, 4, 32), fmt="fp8").shape == (0, 4, 32)
    assert kernels.pool(torch.empty(0, 2, 64)).shape == (0, 32)
    assert route(kernels, router(32, 4, 2), noise(0, 32))[0].shape == (0, 2)
