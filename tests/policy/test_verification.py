"""How many drafts are verified: against the paper's own text, and against every possible choice."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_deepinfer.policy.verification import Curve, assign, in_order, predict, survival, synchronous
from vllm_deepinfer.policy.verification_cost import Lengths, SlotCosts, Vector

chances = st.floats(0, 1) | st.sampled_from([0.0, 0.5, 1.0])  # the latter make ties


@st.composite
def rounds(draw: st.DrawFn, own: bool = True) -> tuple[Vector, Lengths, SlotCosts]:
    """Up to 3 requests × 3 drafts with a jagged base and own costs that grow along a row."""
    requests, drafts = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    confidences = np.array(
        [[draw(chances) for _ in range(drafts)] for _ in range(requests)], dtype=np.float64
    )
    drafted = np.array([draw(st.integers(0, drafts)) for _ in range(requests)])
    base = np.array([draw(st.floats(0.1, 5)) for _ in range(requests * drafts + 1)])
    steps = [[draw(st.floats(0, 1)) * own for _ in range(drafts)] for _ in range(requests)]
    return confidences, drafted, SlotCosts(base, np.cumsum(np.array(steps), axis=1))


def every_choice(drafted: Lengths) -> list[Lengths]:
    return [np.array(each) for each in itertools.product(*(range(n + 1) for n in drafted))]


def rate(survived: Vector, costs: SlotCosts, lengths: Lengths) -> float:
    tokens, seconds = predict(survived, costs, float(len(survived)), lengths)
    return tokens / seconds


def algorithm_1(survived: Vector, sps: Vector) -> list[int]:
    """The paper's pseudo-code, line by line, over a table of steps per second."""
    requests, drafts = survived.shape
    lengths, batch, tau = [0] * requests, requests, float(requests)
    best = tau * sps[batch]
    pool = [(-survived[r, j], j, r) for r in range(requests) for j in range(drafts) if survived[r, j] > 0]
    for negative, j, r in sorted(pool):
        batch, tau = batch + 1, tau - negative
        if not tau * sps[batch] > best:
            break
        best = tau * sps[batch]
        lengths[r] = j + 1
    return lengths


@given(rounds(own=False))
def test_without_own_costs_it_is_algorithm_1_to_the_letter(
    round_: tuple[Vector, Lengths, SlotCosts],
) -> None:
    confidences, drafted, costs = round_
    confidences = np.round(confidences, 3)  # the policy counts what is closer than 2⁻⁴⁰ as a tie
    survived = survival(confidences, drafted)
    sps = np.concatenate([np.full(len(drafted), np.nan), 1 / costs.base])
    base = SlotCosts(1 / sps[len(drafted) :], costs.own)
    rates = [rate(survived, base, np.array(algorithm_1(survived, sps)))]
    rates.append(rate(survived, base, synchronous(survived, base, float(len(drafted)))))
    assert rates[0] == pytest.approx(rates[1], rel=1e-9)


@given(rounds())
def test_the_curve_s_maximum_is_the_best_of_all_choices(round_: tuple[Vector, Lengths, SlotCosts]) -> None:
    """Brute force over every set of prefixes: jagged base, own costs, ties and all."""
    confidences, drafted, costs = round_
    survived = survival(confidences, drafted)
    curve = Curve.of(survived, costs, float(len(drafted)))
    candidates = every_choice((survived > 0).sum(axis=1))
    optimum = max(rate(survived, costs, lengths) for lengths in candidates)
    assert curve.price == pytest.approx(optimum, rel=1e-4)
    lengths = assign(survived, costs, curve.best, curve.price)
    assert rate(survived, costs, lengths) == pytest.approx(optimum, rel=1e-4)


@given(rounds(), st.floats(0.1, 20))
def test_a_guess_changes_nothing_but_time(round_: tuple[Vector, Lengths, SlotCosts], guess: float) -> None:
    confidences, drafted, costs = round_
    survived = survival(confidences, drafted)
    found = Curve.of(survived, costs, float(len(drafted)), guess)
    assert found.price == pytest.approx(Curve.of(survived, costs, float(len(drafted))).price, rel=1e-4)


def test_drafts_that_cost_more_than_a_token_keep_their_order() -> None:
    """Found by the test above: where two more slots make the step cheaper (a better kernel), both are worth
    verifying at a loss, and of the second the cheaper one."""
    survived = np.array([[0.0, 0.0], [1.0, 1.0], [1.0, 0.0]])
    costs = SlotCosts(
        np.array([2.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0]), np.array([[0.0, 0.0], [0.0, 0.75], [1.0, 1.0]]), 0.0
    )
    assert Curve.of(survived, costs, 3.0).price == pytest.approx(5 / 1.75)


@given(rounds(), st.floats(0.1, 12), st.floats(0.2, 5))
def test_within_keeps_the_limit_and_takes_the_best_that_does(
    round_: tuple[Vector, Lengths, SlotCosts], limit: float, weight: float
) -> None:
    confidences, drafted, costs = round_
    curve = Curve.of(survival(confidences, drafted), costs, float(len(drafted)))
    slots = curve.within(limit, weight)
    values = curve.tokens - weight * curve.price * curve.seconds
    fitting = [value for value, seconds in zip(values, curve.seconds, strict=True) if seconds <= limit]
    if fitting:
        assert curve.seconds[slots] <= limit and values[slots] == max(fitting)
    else:
        assert slots == 0
    assert curve.within(np.inf) == curve.best


@given(rounds(), st.integers(0, 9), st.floats(0, 3))
def test_slots_are_given_out_in_full_and_as_prefixes(
    round_: tuple[Vector, Lengths, SlotCosts], slots: int, price: float
) -> None:
    confidences, drafted, costs = round_
    survived = survival(confidences, drafted)
    lengths = assign(survived, costs, slots, price)
    assert lengths.sum() == min(slots, (survived > 0).sum())
    assert (lengths <= (survived > 0).sum(axis=1)).all()


@given(rounds(), st.integers(0, 9), st.floats(0, 3))
def test_no_other_prefixes_of_as_many_slots_are_worth_more(
    round_: tuple[Vector, Lengths, SlotCosts], slots: int, price: float
) -> None:
    confidences, drafted, costs = round_
    survived = survival(confidences, drafted)
    values = np.clip(survived - price * costs.own, -1.0, 1.0)
    chosen = assign(survived, costs, slots, price)

    def worth(lengths: Lengths) -> float:
        return float(values[np.arange(values.shape[1]) < lengths[:, None]].sum())

    others = [each for each in every_choice((survived > 0).sum(axis=1)) if each.sum() == chosen.sum()]
    assert worth(chosen) == pytest.approx(max(map(worth, others)), abs=1e-9)


@given(rounds(), st.data())
def test_early_end_decides_about_a_draft_before_it_sees_it(
    round_: tuple[Vector, Lengths, SlotCosts], data: st.DataObject
) -> None:
    """Losslessness, as far as it is the choice's: confidences behind a draft never change its own fate.

    A draft's token first shows in the confidence of the one behind it.
    """
    confidences, drafted, costs = round_
    row = data.draw(st.integers(0, len(drafted) - 1))
    place = data.draw(st.integers(0, confidences.shape[1] - 1))
    changed = confidences.copy()
    changed[row, place + 1 :] = data.draw(chances)
    for choose in (lambda s: synchronous(s, costs, float(len(s))), lambda s: assign(s, costs, 2, 0.3)):
        before = choose(survival(confidences, drafted))
        after = choose(survival(changed, drafted))
        assert (before[row] > place) == (after[row] > place)


def test_appendix_a() -> None:
    """Worked example of the paper: Θ₀ = 1, Θ₁ = 0.9, and Θ₂ = 1.134 or 0.81, depending on the first token."""
    costs = SlotCosts(1 / np.array([1.0, 0.5, 0.45]), np.zeros((1, 2)))
    for second, best in ((0.9, 2), (0.0, 0)):
        survived = survival(np.array([[0.8, second]]), np.array([2]))
        assert synchronous(survived, costs, 1.0).tolist() == [0]
        assert Curve.of(survived, costs, 1.0).best == best
    curve = Curve.of(survival(np.array([[0.8, 0.9]]), np.array([2])), costs, 1.0)
    assert curve.rates == pytest.approx([1.0, 0.9, 1.134])


def test_ties_go_to_the_earlier_draft_then_to_the_earlier_request() -> None:
    certain = np.ones((3, 2))
    drafted = np.array([2, 2, 2])
    free = SlotCosts(np.ones(7), np.zeros((3, 2)))
    given_out = [assign(survival(certain, drafted), free, n, 0.0).tolist() for n in range(7)]
    assert given_out == [[0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1], [2, 1, 1], [2, 2, 1], [2, 2, 2]]


def test_drafts_that_cannot_survive_are_no_candidates() -> None:
    free = SlotCosts(np.ones(5), np.zeros((2, 2)))
    survived = survival(np.array([[0.0, 1.0], [1.0, 1.0]]), np.array([2, 1]))
    assert survived.tolist() == [[0, 0], [1, 0]]
    assert assign(survived, free, 4, 0.0).tolist() == [0, 1]


def test_a_long_context_gives_way_to_a_short_one() -> None:
    """What a table over tokens cannot see: the same confidence, 64k keys to attend to."""
    own = np.array([[0.5], [0.01]])
    survived = survival(np.array([[0.7], [0.69]]), np.array([1, 1]))
    costs = SlotCosts(np.array([1.0, 1.05, 1.1]), own)
    curve = Curve.of(survived, costs, 2.0)
    assert curve.best == 1
    assert assign(survived, costs, 1, curve.price).tolist() == [0, 1]
    assert assign(survived, costs, 1, 0.0).tolist() == [1, 0]


def test_a_jag_is_filled() -> None:
    """Tiles of four: what is free behind a jag is taken, whatever it is worth; the early end stops before."""
    base = np.array([1.0, 1.5, 1.5, 1.5, 1.5])
    costs = SlotCosts(base, np.zeros((1, 4)))
    survived = survival(np.array([[0.4, 0.9, 0.9, 0.9]]), np.array([4]))
    assert Curve.of(survived, costs, 1.0).best == 4
    assert synchronous(survived, costs, 1.0).tolist() == [0]


def test_order_is_by_place_where_values_are_closer_than_a_step() -> None:
    values, places = np.array([0.5, 0.5 + 2.0**-50, 0.25, 0.25, -0.5, -7.0, -9.0]), np.arange(7)
    assert in_order(values, places).tolist() == [0, 1, 2, 3, 4, 5, 6]
    values[1] += 2.0**-20
    assert in_order(values, places).tolist() == [1, 0, 2, 3, 4, 5, 6]
    assert in_order(values[:3], np.array([9, 4, 2])).tolist() == [4, 9, 2]


def test_more_load_verifies_less() -> None:
    """Steps cost by their rows: from 1 to 64 requests of one kind, the drafts per request only fall."""
    lengths = []
    for requests in (1, 2, 4, 8, 16, 32, 64):
        rows = requests + np.arange(requests * 5 + 1)
        costs = SlotCosts(np.maximum(0.01, 0.0008 * rows), np.zeros((requests, 5)))
        survived = survival(np.full((requests, 5), 0.7), np.full(requests, 5))
        lengths.append(Curve.of(survived, costs, float(requests)).best / requests)
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] == 5 and lengths[-1] == 0


def test_costs_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"4 drafts need a base of one more entry, got 4\."):
        SlotCosts(np.ones(4), np.zeros((2, 2)))
