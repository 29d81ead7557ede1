"""The simulated scheduler as step tables: what runs, how many tokens, which blocks."""

from __future__ import annotations

from random import Random

import pytest

from vllm_deepinfer.engine import GenerateRequest, SamplingParams
from vllm_deepinfer.engine.simulated import SimulatedConfig, Speculation, hashed_tokens
from vllm_deepinfer.engine.simulated.core import SimulatedCore, Step
from vllm_deepinfer.engine.simulated.output import deltas_of
from vllm_deepinfer.engine.simulated.sequence import SimulatedSequence
from vllm_deepinfer.policy.step_cost import Features, StepCost

VOCAB_SIZE = 1_000


def core_of(**sizes: object) -> SimulatedCore:
    defaults = {
        "cost": StepCost(1.0, 1.0),
        "max_model_len": 64,
        "block_size": 4,
        "kv_capacity_tokens": 64,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "vocab_size": VOCAB_SIZE,
    }
    return SimulatedCore(SimulatedConfig(**{**defaults, **sizes}), Random(0))  # type: ignore[arg-type]


def add(
    core: SimulatedCore,
    name: str,
    prompt: list[int],
    max_tokens: int = 50,
    priority: int = 0,
    arrival: int = 0,
    salt: str | None = None,
) -> SimulatedSequence:
    request = GenerateRequest(
        request_id=name,
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=max_tokens),
        priority=priority,
        cache_salt=salt,
    )
    token_at = hashed_tokens(VOCAB_SIZE)(request)
    sequence = SimulatedSequence(request, lambda deltas: None, token_at, arrival, max_tokens, eos=1)
    core.add(sequence)
    return sequence


def run(core: SimulatedCore, step: Step) -> dict[str, int]:
    """Commit a step; returns the number of new tokens per request."""
    new = {}
    for sequence, delta in list(deltas_of(core, step)):
        new[delta.request_id] = len(delta.token_ids)
        if delta.final:
            core.remove(sequence)
    return new


def table(core: SimulatedCore, steps: int) -> list[dict[str, tuple[int, int]]]:
    """Per step: request to (tokens computed, new tokens)."""
    rows = []
    for _ in range(steps):
        step = core.schedule()
        computed = {s.request.request_id: tokens + drafts for s, tokens, drafts in step.batch}
        new = run(core, step)
        rows.append({name: (count, new.get(name, 0)) for name, count in computed.items()})
    return rows


def ids(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


def test_prefill_then_decode_then_the_end() -> None:
    core = core_of()
    add(core, "a", ids(10, 6), max_tokens=3)
    assert table(core, 4) == [{"a": (6, 1)}, {"a": (1, 1)}, {"a": (1, 1)}, {}]
    assert core.pool.used == 0 and not core.running


def test_a_long_prompt_takes_what_the_decodes_leave() -> None:
    core = core_of()
    add(core, "a", ids(10, 2), arrival=1)
    assert table(core, 1) == [{"a": (2, 1)}]
    add(core, "b", ids(100, 40), arrival=2)
    assert table(core, 4) == [
        {"a": (1, 1), "b": (15, 0)},
        {"a": (1, 1), "b": (15, 0)},
        {"a": (1, 1), "b": (10, 1)},
        {"a": (1, 1), "b": (1, 1)},
    ]


def test_slots_limit_who_runs() -> None:
    core = core_of(max_num_seqs=2)
    for arrival, name in enumerate("abc"):
        add(core, name, ids(10 * arrival, 2), max_tokens=2, arrival=arrival)
    assert table(core, 3) == [{"a": (2, 1), "b": (2, 1)}, {"a": (1, 1), "b": (1, 1)}, {"c": (2, 1)}]


def test_a_prefix_hit_skips_whole_blocks_and_leaves_a_token_to_compute() -> None:
    core = core_of()
    add(core, "a", ids(10, 8), max_tokens=1)
    assert table(core, 1) == [{"a": (8, 1)}]
    again = add(
        core, "b", ids(10, 8), max_tokens=1
    )  # both blocks are known, but the last token must be computed
    assert table(core, 1) == [{"b": (4, 1)}]
    assert again.cached == 4
    longer = add(core, "c", ids(10, 9), max_tokens=1)
    assert table(core, 1) == [{"c": (1, 1)}]
    assert longer.cached == 8
    foreign = add(core, "d", ids(10, 9), max_tokens=1, salt="other tenant")
    assert table(core, 1) == [{"d": (9, 1)}]
    assert foreign.cached == 0


def test_two_that_share_a_prefix_share_its_blocks() -> None:
    core = core_of()
    add(core, "a", ids(10, 8), arrival=1)
    table(core, 1)
    add(core, "b", [*ids(10, 8), 99], arrival=2)
    table(core, 1)
    assert core.pool.used == 2 + 1 + 1  # two shared ones, and one of its own for each


def test_a_conversation_finds_its_answer_again() -> None:
    core = core_of()
    first = add(core, "a", ids(10, 6), max_tokens=7)
    table(core, 7)
    turn = [*ids(10, 6), *first.generated, 500]
    second = add(core, "b", turn, max_tokens=1)
    table(core, 1)
    assert second.cached == 12  # 13 tokens had KV only up to the last but one: three full blocks


def test_without_prefix_caching_nothing_is_found() -> None:
    core = core_of(prefix_caching=False)
    for name in "ab":
        sequence = add(core, name, ids(10, 9), max_tokens=1)
        assert table(core, 1) == [{name: (9, 1)}]
        assert sequence.cached == 0


def test_when_kv_runs_out_the_last_one_is_preempted_and_recomputed() -> None:
    core = core_of(max_model_len=16, kv_capacity_tokens=16, prefix_caching=False)
    a = add(core, "a", ids(10, 7), arrival=1)
    b = add(core, "b", ids(30, 7), arrival=2)
    assert table(core, 3) == [
        {"a": (7, 1), "b": (7, 1)},
        {"a": (1, 1), "b": (1, 1)},
        {"a": (1, 1)},  # a's ninth token needs a third block: b gives up its two
    ]
    assert (core.preemptions, core.waiting, b.computed, len(b.generated)) == (1, 1, 0, 2)
    core.remove(a)
    assert table(core, 1) == [{"b": (9, 1)}]  # prompt and answer so far, computed anew
    tokens = hashed_tokens(VOCAB_SIZE)(b.request)
    assert b.generated == [tokens(i) for i in range(3)]


def test_priority_decides_who_is_admitted_and_who_is_preempted() -> None:
    core = core_of(max_model_len=16, kv_capacity_tokens=16, prefix_caching=False)
    add(core, "late but urgent", ids(10, 7), priority=0, arrival=2)
    add(core, "early", ids(30, 7), priority=1, arrival=1)
    rows = table(core, 3)
    assert list(rows[0]) == ["late but urgent", "early"]
    assert list(rows[2]) == ["late but urgent"]


def test_a_request_that_does_not_fit_is_not_overtaken() -> None:
    core = core_of(max_model_len=32, kv_capacity_tokens=32, prefix_caching=False, max_num_batched_tokens=32)
    add(core, "a", ids(10, 20), arrival=1)
    add(core, "big", ids(100, 13), arrival=2)
    add(core, "small", ids(200, 2), arrival=3)
    assert table(core, 1) == [{"a": (20, 1), "big": (12, 0)}]  # a chunk of it fits
    assert core.waiting == 1


def test_drafts_are_computed_and_accepted_ones_come_with_the_token() -> None:
    core = core_of(speculation=Speculation(draft_tokens=3, acceptance=1.0))
    a = add(core, "a", ids(10, 4), max_tokens=10)
    assert table(core, 4) == [{"a": (4, 1)}, {"a": (4, 4)}, {"a": (4, 4)}, {"a": (1, 1)}]
    tokens = hashed_tokens(VOCAB_SIZE)(a.request)
    assert a.generated == [tokens(i) for i in range(10)]


def test_rejected_drafts_are_computed_in_vain() -> None:
    core = core_of(speculation=Speculation(draft_tokens=3, acceptance=0.0))
    add(core, "a", ids(10, 4), max_tokens=10)
    assert table(core, 3) == [{"a": (4, 1)}, {"a": (4, 1)}, {"a": (4, 1)}]


def test_removing_is_idempotent_wherever_a_request_is() -> None:
    core = core_of(max_num_seqs=1)
    a, b = add(core, "a", ids(10, 4), arrival=1), add(core, "b", ids(20, 4), arrival=2)
    step = core.schedule()
    for sequence in (a, a, b, b):
        core.remove(sequence)
    assert run(core, step) == {}, "what was removed during a step gets nothing from it"
    assert (core.pool.used, core.waiting, core.queued_prompt_tokens, core.running) == (0, 0, 0, [])
    assert core.schedule().batch == []


def test_features_add_decodes_and_chunks() -> None:
    core = core_of()
    add(core, "a", ids(10, 5), arrival=1)
    table(core, 1)
    add(core, "b", ids(30, 6), arrival=2)
    assert core.schedule().features == Features(
        tokens=6, attended=18, decodes=1, decode_context=5, prefill_context=0
    )


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"kv_capacity_tokens": 60}, "cannot hold one request"),
        ({"max_num_seqs": 17}, "some decodes could never run"),
        ({"block_size": 0}, "block_size must be at least 1"),
        ({"eos_token_id": VOCAB_SIZE}, "not below vocab_size"),
    ],
)
def test_a_config_that_cannot_work_is_refused(sizes: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        core_of(**sizes)


def test_speculation_is_checked() -> None:
    with pytest.raises(ValueError, match="draft_tokens must be at least 1"):
        Speculation(draft_tokens=0, acceptance=0.5)
    with pytest.raises(ValueError, match="must be a probability"):
        Speculation(draft_tokens=1, acceptance=1.5)
