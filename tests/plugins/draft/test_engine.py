"""The drafter inside vLLM: its drafts are the plain form's, and its answers those without it, to the token.

Random weights accept nothing, so most drafts are replaced by what the target is known to write, some wrongly.
DEEPINFER_LOSSLESS_PROMPTS says how many prompts; the sizes make the engine cut chunks, preempt, hit prefixes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm_deepinfer_plugins.draft.load import load_drafter
from vllm_deepinfer_plugins.draft.proposer import DSparkProposer
from vllm_deepinfer_plugins.draft.settle import PROPOSER
from vllm_deepinfer_plugins.draft.whole import teacher_forced

from tests.plugins.model import engines
from tests.plugins.model.samples import backbone
from vllm_deepinfer.policy.step_cost import StepCost
from vllm_deepinfer.policy.step_cost_learner import StepCostLearner

pytestmark = pytest.mark.slow

NAME = "deepseek-v4.1-tiny-dspark"
COUNT = int(os.environ.get("DEEPINFER_LOSSLESS_PROMPTS", "10"))
TOKENS = 12
SHARED = engines.prompts([90], seed=1)[0]
PROMPTS = [
    (SHARED[: 16 * (number % 5)] if number % 2 else []) + own
    for number, own in enumerate(engines.prompts([1 + 37 * n % 113 for n in range(COUNT)], seed=3))
]
SPECULATION = {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": 5}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return engines.checkpoint(NAME, tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def alone(path: Path) -> list[list[int]]:
    """What the target writes without speculation."""
    with engines.engine(path, invariant=True) as llm:
        return engines.greedy(llm, PROMPTS, TOKENS)


@pytest.fixture(scope="module")
def speculating(path: Path, alone: list[list[int]]) -> Iterator[Any]:
    """Few blocks and short steps: chunks, preemption, prefix hits. The other engine is gone by now."""
    settings: dict[str, Any] = {"block_size": 16, "max_num_batched_tokens": 96, "max_num_seqs": 12}
    settings |= {"max_model_len": 256, "num_gpu_blocks_override": 160}
    with engines.engine(path, invariant=True, speculative_config=SPECULATION, **settings) as llm:
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        # Known from the start, so that what is dropped does not hang on how steady this machine is.
        cost = StepCost(per_step=5e-3, per_token=1e-3, per_decode=1e-3)
        scheduler._learner = StepCostLearner(cost, cost)
        scheduler.judge.pause = None  # the tests want drafts, whether they pay or not
        yield llm


def metric(llm: Any, name: str) -> float:
    return float(sum(m.value for m in llm.get_metrics() if m.name == name))


def guessing(monkeypatch: pytest.MonkeyPatch, alone: list[list[int]]) -> None:
    """Three of four drafts become what the target writes next."""
    whole = [prompt + answer for prompt, answer in zip(PROMPTS, alone, strict=True)]
    original = DSparkProposer.propose

    def propose(self: Any, sampled: Any, lengths: Any, ids: Any, slot_mappings: Any = None) -> Any:
        drafts = original(self, sampled, lengths, ids, slot_mappings)
        for row, draft in enumerate(drafts):
            known = ids[row, : lengths[row]].tolist()
            truth = next((w[len(known) :] for w in whole if w[: len(known)] == known), [])
            for place, token in enumerate(truth[: len(draft)]):
                if (lengths[row] + 7 * place + row) % 4:
                    draft[place] = token
        return drafts

    monkeypatch.setattr(DSparkProposer, "propose", propose)


def test_answers_are_those_without_speculation(
    speculating: Any, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    guessing(monkeypatch, alone)
    hits = metric(speculating, "vllm:prefix_cache_hits")
    for _ in range(2):
        assert engines.greedy(speculating, PROMPTS, TOKENS) == alone
    accepted = metric(speculating, "vllm:spec_decode_num_accepted_tokens")
    verified = metric(speculating, "vllm:spec_decode_num_draft_tokens")
    assert accepted > 2 * COUNT * TOKENS / 4 and verified > accepted + COUNT
    assert metric(speculating, "vllm:prefix_cache_hits") > hits
    counts = speculating.llm_engine.engine_core.engine_core.scheduler.judge.counts
    assert counts.totals["steps:scheduled"] > 0 and counts.positions["accepted", 0] > 0
    assert counts.positions["verified", 4] < counts.positions["drafted", 4], "nothing was ever dropped"


@torch.no_grad()
def test_drafts_are_those_of_the_plain_form(speculating: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the features that the engine itself met: its selections differ from the plain form's in ties."""
    seen: list[tuple[list[int], list[int], list[float]]] = []
    features: dict[int, dict[int, torch.Tensor]] = {5: {}, 6: {}, 7: {}}
    [model] = speculating.apply_model(lambda model: model)
    propose, tap = DSparkProposer.propose, model.backbone.tap

    def spied(self: Any, sampled: Any, lengths: Any, ids: Any, slot_mappings: Any = None) -> Any:
        drafts = propose(self, sampled, lengths, ids, slot_mappings)
        seen.extend((ids[0, : lengths[0]].tolist(), list(draft), draft.confidences) for draft in drafts)
        return drafts

    def tapped(layer: int, streams: torch.Tensor, sequence: Any) -> None:
        if layer in features:
            features[layer].update(zip(sequence.positions.tolist(), streams.mean(1), strict=True))
        tap(layer, streams, sequence)

    monkeypatch.setattr(DSparkProposer, "propose", spied)
    monkeypatch.setattr(model.backbone, "tap", tapped)
    engines.greedy(speculating, engines.prompts([120], seed=11), TOKENS)
    seen = [each for each in seen if len(each[1]) == 5]
    assert len(seen) >= 3
    drafter = load_drafter(engines.FIXTURES / NAME)
    for known, draft, confidences in seen:
        ids, length = torch.tensor(known + draft), len(known) - 1
        rows = torch.cat([torch.stack([features[k][i] for i in range(length)]) for k in (5, 6, 7)], dim=-1)
        rows = torch.cat((rows, rows.new_zeros(len(ids) - length, rows.shape[1])))
        logits, sure = teacher_forced(drafter, backbone(NAME), ids, rows, torch.tensor([length]))
        assert logits[0].argmax(-1).tolist() == draft
        assert torch.allclose(sure[0].sigmoid(), torch.tensor(confidences), atol=1e-4)


class Never:
    """A pause that never ends."""

    def drafts(self, decodes: int) -> bool:
        return False

    def took(self, decodes: int, predicted: float, seconds: float) -> None:
        self.seen = (decodes, predicted, seconds)


def test_nothing_is_drafted_in_a_pause_and_answers_stay(speculating: Any, alone: list[list[int]]) -> None:
    judge = speculating.llm_engine.engine_core.engine_core.scheduler.judge
    drafted, paused = metric(speculating, "vllm:spec_decode_num_draft_tokens"), judge.counts.totals["paused"]
    judge.pause = never = Never()
    try:
        assert engines.greedy(speculating, PROMPTS, TOKENS) == alone
    finally:
        judge.pause = None
    assert metric(speculating, "vllm:spec_decode_num_draft_tokens") == drafted
    assert judge.counts.totals["paused"] >= paused + TOKENS - 1
    decodes, predicted, seconds = never.seen
    assert 1 <= decodes <= 12 and predicted > 0 and seconds > 0
    assert any(engines.greedy(speculating, PROMPTS[:1], TOKENS))
    assert metric(speculating, "vllm:spec_decode_num_draft_tokens") > drafted, "drafting goes on behind it"


def test_structured_output_and_drawn_tokens(speculating: Any) -> None:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    asked = [{"prompt_token_ids": prompt} for prompt in PROMPTS[:4]]
    choice = SamplingParams(
        temperature=0, max_tokens=8, structured_outputs=StructuredOutputsParams(choice=["aa", "bb"])
    )
    texts = [out.outputs[0].text for out in speculating.generate(asked, choice, use_tqdm=False)]
    # A prompt of random bytes may end inside a character, and then vLLM's text begins with its end.
    assert all(text.endswith(("aa", "bb")) for text in texts), texts
    drawn = SamplingParams(temperature=1.0, seed=5, max_tokens=8, ignore_eos=True)
    answers = [list(o.outputs[0].token_ids) for o in speculating.generate(asked, drawn, use_tqdm=False)]
    assert all(len(tokens) == 8 for tokens in answers) and len(set(map(tuple, answers))) > 1


def test_an_answer_ends_inside_a_block_of_accepted_drafts(
    speculating: Any, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import SamplingParams

    guessing(monkeypatch, alone)
    asked = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    ends = [answer[4] for answer in alone]
    sampling = [
        SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, stop_token_ids=[end])
        for end in ends
    ]
    for out, answer, end in zip(
        speculating.generate(asked, sampling, use_tqdm=False), alone, ends, strict=True
    ):
        assert list(out.outputs[0].token_ids) == answer[: answer.index(end) + 1]
        assert out.outputs[0].finish_reason == "stop" and out.outputs[0].stop_reason == end
    plain = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    texts = [out.outputs[0].text for out in speculating.generate(asked, plain, use_tqdm=False)]
    stops = [text[len(text) // 3 : len(text) // 3 + 2] for text in texts]
    assert sum(len(stop) == 2 for stop in stops) > COUNT // 2
    sampling = [
        SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, stop=[stop] if stop else [])
        for stop in stops
    ]
    found = speculating.generate(asked, sampling, use_tqdm=False)
    for out, text, stop in zip(found, texts, stops, strict=True):
        assert out.outputs[0].text == (text[: text.index(stop)] if stop else text)


def test_aborted_requests_leave_no_block_and_change_no_answer(
    speculating: Any, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import SamplingParams

    guessing(monkeypatch, alone)
    engine = speculating.llm_engine
    pool = engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    free = pool.get_num_free_blocks()
    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(f"ends-{number}", {"prompt_token_ids": prompt}, sampling)
        engine.add_request(f"left-{number}", {"prompt_token_ids": prompt}, sampling)
    answers: dict[str, list[int]] = {}
    leaving = [f"left-{number}" for number in range(COUNT)]
    while engine.has_unfinished_requests():
        for out in engine.step():
            if out.finished:
                answers[out.request_id] = list(out.outputs[0].token_ids)
        if leaving:
            engine.abort_request([leaving.pop()])
    assert [answers[f"ends-{number}"] for number in range(COUNT)] == alone
    left = {key: tokens for key, tokens in answers.items() if key.startswith("left")}
    assert len(left) < COUNT, "some were aborted before their end"
    assert all(tokens == alone[int(key.removeprefix("left-"))] for key, tokens in left.items())
    assert pool.get_num_free_blocks() == free
