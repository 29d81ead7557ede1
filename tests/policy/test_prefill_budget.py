"""Chunks cut to a time budget: against brute force, and the starvation cases as step tables."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from vllm_deepinfer.policy.prefill_budget import Patience, Prefill, StepBudget, plan
from vllm_deepinfer.policy.step_cost import TWO_CORE_DENSE, AttentionBound, Features, StepCost, Work

coefficients = st.floats(0, 1, allow_subnormal=False)
costs = st.builds(
    StepCost,
    *[coefficients] * 6,
    attention=st.builds(
        AttentionBound, window=st.none() | st.integers(1, 512), top_k=st.none() | st.integers(1, 512)
    ),
    tile=st.sampled_from([1, 8, 32]),
)
decode_sets = st.builds(
    Features, decodes=st.integers(0, 64), decode_context=st.integers(0, 10_000), tokens=st.integers(0, 64)
)
limits = st.floats(0, 3_000)
queues = st.lists(st.tuples(st.integers(0, 2_000), st.integers(1, 400)), max_size=5).map(
    lambda pairs: [Prefill(str(i), context, tokens) for i, (context, tokens) in enumerate(pairs)]
)


def total(cost: StepCost, decodes: Features, chunks: dict[str, int], queue: list[Prefill]) -> float:
    work = [Work(p.context, prefill_tokens=chunks[p.key]) for p in queue if p.key in chunks]
    return cost.seconds(sum((cost.features(w) for w in work), decodes))


@given(costs, decode_sets, limits, st.integers(0, 600), st.integers(0, 2_000), st.integers(0, 400))
def test_a_chunk_is_the_largest_that_fits(
    cost: StepCost, decodes: Features, limit: float, cap: int, context: int, wanted: int
) -> None:
    """Brute force over every size: all that is wanted, or the last tile end that fits."""
    budget = StepBudget(cost, decodes, limit, cap)
    most = min(wanted, cap)
    ends = [
        n for n in range(1, most + 1) if n == most or (decodes.tokens + decodes.decodes + n) % cost.tile == 0
    ]
    fitting = [n for n in ends if budget.fits(context, n)]
    assert budget.chunk(context, wanted) == max(fitting, default=0)


@given(costs, decode_sets, limits, st.integers(0, 2_000), st.integers(1, 400))
def test_fits_is_the_cost_model_s_own_sum(
    cost: StepCost, decodes: Features, limit: float, context: int, tokens: int
) -> None:
    predicted = cost.seconds(decodes + cost.features(Work(context, prefill_tokens=tokens)))
    assume(abs(predicted - limit) > 1e-9 * max(predicted, 1))
    assert StepBudget(cost, decodes, limit, 1_000).fits(context, tokens) == (predicted <= limit)


@given(costs, decode_sets, limits, st.integers(0, 600), queues)
def test_a_step_keeps_its_budget_and_its_cap(
    cost: StepCost, decodes: Features, limit: float, cap: int, queue: list[Prefill]
) -> None:
    """Guarantee (a): whatever is chosen, if anything is, it fits."""
    budget = StepBudget(cost, decodes, limit, cap)
    chunks = plan(budget, queue)
    assert sum(chunks.values()) <= cap and budget.tokens_left == cap - sum(chunks.values())
    assert all(0 < chunks[p.key] <= p.remaining for p in queue if p.key in chunks)
    assert budget.predicted == pytest.approx(total(cost, decodes, chunks, queue))
    if chunks:
        assert total(cost, decodes, chunks, queue) <= limit * (1 + 1e-9)


@given(costs, decode_sets, limits, st.integers(1, 600), queues, st.integers(1, 64))
def test_a_forced_step_gives_the_first_its_smallest_chunk(
    cost: StepCost, decodes: Features, limit: float, cap: int, queue: list[Prefill], smallest: int
) -> None:
    """Guarantee (b): and the step is over its budget by no more than that chunk."""
    assume(queue)
    first = queue[0]
    chunks = plan(StepBudget(cost, decodes, limit, cap), queue, smallest)
    assert chunks.get(first.key, 0) >= min(smallest, first.remaining, cap) or StepBudget(
        cost, decodes, limit, cap
    ).fits(first.context, chunks[first.key])
    if total(cost, decodes, chunks, queue) > limit * (1 + 1e-9):
        assert chunks == {first.key: min(smallest, first.remaining, cap)}


@given(costs, decode_sets, limits, st.integers(0, 600), queues)
def test_nobody_is_served_past_one_that_was_cut(
    cost: StepCost, decodes: Features, limit: float, cap: int, queue: list[Prefill]
) -> None:
    chunks = plan(StepBudget(cost, decodes, limit, cap), queue)
    cut = [i for i, p in enumerate(queue) if 0 < chunks.get(p.key, 0) < p.remaining]
    assert len(cut) <= 1
    assert not cut or all(p.key not in chunks for p in queue[cut[0] + 1 :])


@given(decode_sets, st.floats(1, 2_000), st.integers(0, 2_000), st.integers(0, 1_000))
def test_a_longer_context_never_gets_a_larger_chunk(
    decodes: Features, limit: float, context: int, more: int
) -> None:
    cost = StepCost(1.0, 0.3, 1e-3, 0.5, 1e-4, 0.01, tile=8)
    near = StepBudget(cost, decodes, limit, 4_096).chunk(context, 10_000)
    assert StepBudget(cost, decodes, limit, 4_096).chunk(context + more, 10_000) <= near


def test_without_a_limit_the_cap_counts() -> None:
    budget = StepBudget(TWO_CORE_DENSE, Features(), math.inf, 8_192)
    queue = [Prefill("a", 0, 5_000), Prefill("b", 0, 9_000)]
    assert plan(budget, queue) == {"a": 5_000, "b": 3_192}


def test_the_same_budget_buys_less_at_a_longer_context() -> None:
    """40 ms, four decodes. A worked example: 32.6 ms of dense and attention work at x = 0, 11.5 at 16k."""
    decodes = Features(decodes=4, decode_context=8_000)
    sizes = [
        StepBudget(TWO_CORE_DENSE, decodes, 0.04, 8_192).chunk(x, 30_000) for x in (0, 4_096, 16_384, 65_536)
    ]
    assert sizes == [668, 284, 92, 0]  # with the four decodes, whole tiles


def test_a_cached_prefix_costs_what_is_left_of_it() -> None:
    decodes = Features(decodes=4, decode_context=8_000)
    queue = [Prefill("hit", 3_968, 128), Prefill("next", 0, 1_000)]
    chunks = plan(StepBudget(TWO_CORE_DENSE, decodes, 0.04, 8_192), queue)
    assert chunks["hit"] == 128 and 0 < chunks["next"] < 1_000


def test_a_chunk_that_would_cost_more_to_start_than_to_compute_waits() -> None:
    """ "far" would re-read 16k keys, 8 ms, for 3 ms of work; after "near" it is left to a step of its own."""
    budget = StepBudget(TWO_CORE_DENSE, Features(decodes=1), 0.030, 8_192)
    assert plan(budget, [Prefill("near", 0, 64), Prefill("far", 16_384, 9_000)])["near"] == 64
    lone = StepBudget(TWO_CORE_DENSE, Features(decodes=1), 0.024, 8_192)
    assert not lone.worthwhile(16_384, 32)
    assert plan(lone, [Prefill("near", 0, 1), Prefill("far", 16_384, 9_000)]) == {"near": 1}
    again = StepBudget(TWO_CORE_DENSE, Features(decodes=1), 0.024, 8_192)
    assert plan(again, [Prefill("far", 16_384, 9_000)]) == {"far": 31}


def test_patience() -> None:
    patience = Patience(3)
    seen = []
    for _ in range(7):
        seen.append(patience.exhausted)
        patience.note(waiting=True, progressed=patience.exhausted, over=patience.exhausted)
    assert seen == [False, False, True, False, False, True, False]
    assert patience.forced == 2
    patience.note(waiting=False, progressed=False, over=False)
    assert not patience.exhausted
    with pytest.raises(ValueError, match="at least 1 step"):
        Patience(0)


# ---- starvation cases, as step tables: an engine that does what is planned ----


@dataclass
class Table:
    """One line per step: predicted seconds, decodes in it, chunks."""

    cost: StepCost
    limit: float
    cap: int = 8_192

    def run(
        self, decodes: int, lengths: list[int], most: int = 100_000
    ) -> list[tuple[float, dict[str, int]]]:
        """Decodes that never end, and prompts that are served in their order."""
        left = {str(i): length for i, length in enumerate(lengths)}
        done = dict.fromkeys(left, 0)
        contexts, patience = [1_000] * decodes, Patience()
        lines: list[tuple[float, dict[str, int]]] = []
        while left and len(lines) < most:
            features = sum((self.cost.features(Work(x)) for x in contexts), Features())
            budget = StepBudget(self.cost, features, self.limit if decodes else math.inf, self.cap)
            queue = [Prefill(key, done[key], n) for key, n in left.items()]
            chunks = plan(budget, queue, self.cost.tile if patience.exhausted else 0)
            patience.note(True, queue[0].key in chunks, budget.predicted > self.limit)
            lines.append((budget.predicted, chunks))
            for key, chunk in chunks.items():
                done[key] += chunk
                left[key] -= chunk
            left = {key: n for key, n in left.items() if n}
            contexts = [x + 1 for x in contexts]
        return lines


GPU_LIKE = StepCost(2e-3, 5e-6, 2e-11, 2e-5, 2e-10, 1e-9, tile=64)


def test_one_decode_and_a_prompt_of_200k_tokens() -> None:
    """Bug class 32: no gap between tokens above budget + one decode step."""
    lines = Table(GPU_LIKE, limit=0.02).run(1, [200_000])
    decode_step = GPU_LIKE.predict([Work(1_000)])
    assert sum(sum(chunks.values()) for _, chunks in lines) == 200_000
    assert max(seconds for seconds, _ in lines) <= 0.02 + decode_step
    first, last = lines[0][1]["0"], lines[-2][1]["0"]
    assert first > 3_000 > 2_000 > last  # the reason why a fixed chunk cannot do it


def test_the_same_on_two_cores_where_reading_the_context_alone_exceeds_the_budget() -> None:
    """At 200k, keys are read in 100 ms: every eighth step holds one tile then, the rest keep the budget."""
    lines = Table(TWO_CORE_DENSE, limit=0.04).run(1, [200_000])
    over = [index for index, (seconds, _) in enumerate(lines) if seconds > 0.04]
    assert over and all(b - a >= 8 for a, b in pairwise(over))
    assert all(lines[index][1]["0"] <= 32 for index in over)
    assert sum(sum(chunks.values()) for _, chunks in lines) == 200_000


@pytest.mark.parametrize("limit", [0.0, 0.011, 0.04])
def test_eight_endless_decodes_and_one_prompt(limit: float) -> None:
    """Bug class 32b: a bound on TTFT in steps, even if the decodes alone exceed the budget."""
    lines = Table(TWO_CORE_DENSE, limit).run(8, [3_000])
    assert len(lines) <= 8 * math.ceil(3_000 / 32)
    assert sum(chunks.get("0", 0) for _, chunks in lines) == 3_000


def test_four_prefills_in_flight_share_one_budget() -> None:
    """Bug class 32c: several prefills in one step must not each get a whole budget."""
    lines = Table(TWO_CORE_DENSE, limit=0.04).run(4, [300, 200, 2_000, 100])
    assert all(seconds <= 0.04 for seconds, _ in lines)
    assert lines[0][1]["0"] == 300 and lines[0][1]["1"] == 200 and "2" in lines[0][1]
    assert all(seconds >= 0.8 * 0.04 for seconds, _ in lines[:-1])


@given(st.integers(0, 24), st.lists(st.integers(1, 3_000), min_size=1, max_size=4), st.floats(0, 0.1))
def test_every_prompt_ends_within_its_bound(decodes: int, lengths: list[int], limit: float) -> None:
    """(b) as a function of the work ahead: 8 steps per tile of everything up to and including it."""
    lines = Table(TWO_CORE_DENSE, limit).run(decodes, lengths)
    ahead = 0
    for index, length in enumerate(lengths):
        ahead += math.ceil(length / 32) + 1
        ended = max(step for step, (_, chunks) in enumerate(lines) if str(index) in chunks)
        assert ended < 8 * ahead
