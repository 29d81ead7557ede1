"""The output is distributed as without drafts: a small target and drafter, real rejection sampling, χ².

Confidences depend on the tokens that were drawn, as a drafter's do, and the costs make the choice depend on
them as much as it can. The version that looks at all of them is caught by the same test.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from vllm_deepinfer.policy.verification import Curve, assign, survival, synchronous
from vllm_deepinfer.policy.verification_cost import Lengths, SlotCosts, Vector

TARGET = np.array([[0.60, 0.30, 0.10], [0.20, 0.50, 0.30], [0.35, 0.05, 0.60]])  # p(next | last)
DRAFTER = np.array([[0.40, 0.40, 0.20], [0.45, 0.25, 0.30], [0.20, 0.30, 0.50]])
SURE = np.array([[0.75, 0.95], [0.70, 0.30], [0.80, 0.55]])  # confidence by last token, [token, request]
REQUESTS, DRAFTS, STEPS = 2, 3, 3
COSTS = SlotCosts(
    np.array([1.0, 1.9, 2.0, 2.1, 2.9, 3.0, 3.1]), np.array([[0.0, 0.01, 0.02], [0.02, 0.03, 0.05]])
)
TRIALS = 100_000

Choice = Callable[[Vector, Vector], Lengths]
"""Survival two steps ago and now, each [requests, drafts], to lengths."""


def early_end(old: Vector, now: Vector) -> Lengths:
    return synchronous(
        now, SlotCosts(np.array([1, 1.3, 1.5, 1.9, 2.1, 2.8, 2.9]), COSTS.own), float(REQUESTS)
    )


def delayed(old: Vector, now: Vector) -> Lengths:
    curve = Curve.of(old, COSTS, float(REQUESTS))
    return assign(now, COSTS, curve.best, curve.price)


def greedy_for_the_future(old: Vector, now: Vector) -> Lengths:
    """The global maximum over the drafts that are to be decided: what the early end and the delay prevent."""
    curve = Curve.of(now, COSTS, float(REQUESTS))
    return assign(now, COSTS, curve.best, curve.price)


def draw(random: np.random.Generator, rows: Vector) -> Lengths:
    """One token per row of probabilities."""
    token: Lengths = (random.random((*rows.shape[:-1], 1)) > rows.cumsum(-1)[..., :-1]).sum(-1)
    return token


def step(
    random: np.random.Generator, last: Lengths, choose: Choice, old: Vector | None
) -> tuple[Lengths, Lengths, Vector]:
    """Draft, choose, verify: [trials, requests, drafts + 1] tokens, how many count, and the survivals."""
    trials = len(last)
    tokens, seen = np.zeros((trials, REQUESTS, DRAFTS + 1), np.int64), [last]
    for _ in range(DRAFTS):
        seen.append(draw(random, DRAFTER[seen[-1]]))
    confidences = np.stack([SURE[each, np.arange(REQUESTS)] for each in seen[:-1]], axis=-1)
    now = np.cumprod(confidences, axis=-1)
    lengths = decide(choose, now if old is None else old, now)
    alive = np.ones((trials, REQUESTS), np.bool_)
    counts = np.zeros((trials, REQUESTS), np.int64)
    for place in range(DRAFTS + 1):
        before = seen[place]
        target = TARGET[before]
        verified = alive & (place < lengths)
        offered = seen[place + 1] if place < DRAFTS else before
        chance = (
            np.take_along_axis(target, offered[..., None], -1)[..., 0]
            / np.take_along_axis(DRAFTER[before], offered[..., None], -1)[..., 0]
        )
        accepted = verified & (random.random((trials, REQUESTS)) < chance)
        left = np.maximum(target - DRAFTER[before], 0)
        left = left / left.sum(-1, keepdims=True)
        own = draw(random, np.where(verified[..., None], left, target))
        tokens[..., place] = np.where(accepted, offered, own)
        counts += alive
        alive = accepted
    return tokens, counts, now


def decide(choose: Choice, old: Vector, now: Vector) -> Lengths:
    """The choice of every trial; alike ones are made once."""
    both = np.concatenate([old, now], axis=1).reshape(len(now), -1)
    marks = (both * np.sqrt(np.arange(2, both.shape[1] + 2))).sum(axis=1)  # alike rows have the same
    _, first, which = np.unique(marks, return_index=True, return_inverse=True)
    made = np.array([choose(*each.reshape(2, REQUESTS, DRAFTS)) for each in both[first]])
    return made[which]


def generate(choose: Choice, seed: int) -> Lengths:
    """The first three tokens of both requests: [trials, requests, 3], from three steps or fewer each."""
    random = np.random.default_rng(seed)
    out = np.full((TRIALS, REQUESTS, STEPS * (DRAFTS + 1)), -1)
    length = np.zeros((TRIALS, REQUESTS), np.int64)
    last = np.zeros((TRIALS, REQUESTS), np.int64)
    history: list[Vector] = []
    for number in range(STEPS):
        old = history[number - 2] if number >= 2 else history[0] if history else None
        if old is None:  # nothing is old enough: what a typical anchor would give, the same for everyone
            old = np.broadcast_to(
                np.cumprod(np.full((REQUESTS, DRAFTS), 0.7), -1), (TRIALS, REQUESTS, DRAFTS)
            )
        tokens, counts, now = step(random, last, choose, old)
        history.append(now)
        for place in range(DRAFTS + 1):
            rows = place < counts
            at = np.nonzero(rows)
            out[(*at, length[rows])] = tokens[..., place][rows]
            length += rows
        last = np.take_along_axis(out, length[..., None] - 1, -1)[..., 0]
    return out[..., :3]


def chi_square(counts: NDArray[np.int64], expected: Vector) -> tuple[float, float]:
    """χ² and where its upper 0.003 % begins (Wilson and Hilferty)."""
    freedom = len(expected) - 1
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return statistic, freedom * (1 - 2 / (9 * freedom) + 4 * math.sqrt(2 / (9 * freedom))) ** 3


def joint(tokens: Lengths) -> Vector:
    """Probability of each row of tokens, [n, 3], after token 0."""
    found: Vector = (
        TARGET[0, tokens[:, 0]] * TARGET[tokens[:, 0], tokens[:, 1]] * TARGET[tokens[:, 1], tokens[:, 2]]
    )
    return found


ALL = np.array(list(np.ndindex(3, 3, 3)))


def distances(choose: Choice, seed: int) -> list[tuple[float, float]]:
    """χ² and its bound: of either request's three tokens, and of both requests' first two together."""
    tokens = generate(choose, seed)
    single = joint(ALL)
    found = [chi_square(counted(code(tokens[:, r]), 27), TRIALS * single) for r in range(REQUESTS)]
    first_two = single.reshape(9, 3).sum(axis=1)
    together = code(tokens[:, 0, :2]) * 9 + code(tokens[:, 1, :2])
    pairs = np.outer(first_two, first_two).ravel()
    return [*found, chi_square(counted(together, 81), TRIALS * pairs)]


def counted(codes: Lengths, cells: int) -> Lengths:
    return np.bincount(codes, minlength=cells).astype(np.int64)


def code(tokens: Lengths) -> Lengths:
    found: Lengths = tokens @ 3 ** np.arange(tokens.shape[-1])[::-1]
    return found


@pytest.mark.parametrize("choose", [early_end, delayed])
def test_the_output_is_the_target_s(choose: Choice) -> None:
    """100 000 runs of two requests that compete for the same slots."""
    for statistic, bound in distances(choose, seed=1):
        assert statistic < bound


def test_the_same_test_catches_a_choice_that_looks_ahead() -> None:
    found = distances(greedy_for_the_future, seed=1)
    assert max(statistic / bound for statistic, bound in found) > 3


@pytest.mark.parametrize("choose", [early_end, delayed])
def test_the_choice_depends_on_the_tokens_or_the_test_would_show_nothing(choose: Choice) -> None:
    random = np.random.default_rng(2)
    tokens = random.integers(0, 3, (200, 2, REQUESTS, DRAFTS))
    survived = np.cumprod(SURE[tokens, np.arange(REQUESTS)[:, None]], axis=-1)
    lengths = {tuple(choose(old, now)) for old, now in survived}
    assert len(lengths) >= 3


def first_token(choose: Callable[[Vector], int]) -> float:
    """Appendix A, exactly: P(A) of the first output token. p_t = (0.7, 0.3), p_d = (0.5, 0.5), γ = 2."""
    target, drafter = np.array([0.7, 0.3]), np.array([0.5, 0.5])
    total = 0.0
    for token, second in ((0, 0.9), (1, 0.0)):
        survived = survival(np.array([[0.8, second]]), np.array([2]))
        if choose(survived) == 0:
            total += drafter[token] * target[0]
        else:
            accepted = min(1.0, target[token] / drafter[token])
            left = np.maximum(target - drafter, 0)
            total += drafter[token] * (accepted * (token == 0) + (1 - accepted) * left[0] / left.sum())
    return float(total)


def test_appendix_a_gives_070_and_085_without_the_early_end() -> None:
    costs = SlotCosts(1 / np.array([1.0, 0.5, 0.45]), np.zeros((1, 2)))

    def delayed_by(slots: int) -> Callable[[Vector], int]:
        return lambda survived: int(assign(survived, costs, slots, 0.0).sum())

    assert first_token(lambda s: int(synchronous(s, costs, 1.0).sum())) == pytest.approx(0.70)
    assert first_token(lambda s: Curve.of(s, costs, 1.0).best) == pytest.approx(0.85)
    for slots in range(3):  # the delayed form: whatever number the past has led to
        assert first_token(delayed_by(slots)) == pytest.approx(0.70)
