"""Replays in real engines: every answer is checked against the rule by the letter."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm_deepinfer_plugins.replay.sizes import Sizes

from tests.plugins.model.literal import literal
from tests.plugins.replay import entries_connector

from .oracle import BLOCK, ENGINES, ON, VOCAB, Log, check, cold_entries, engine, model_of, scheduler_of

pytestmark = pytest.mark.slow
more = pytest.mark.skipif(not ENGINES, reason="an engine of its own: set DEEPINFER_REPLAY_ENGINES=1")

WINDOW = 16
TOKENS = 6


def ids(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(300, VOCAB, (count,), generator=generator).tolist()


DOCUMENT = ids(112, seed=1)


def serve(llm: Any, prompts: dict[str, list[int]], tokens: int = TOKENS, **given: Any) -> dict[str, Any]:
    """Outputs of prompts that come in together, by name."""
    from vllm import SamplingParams

    params = SamplingParams(**{"temperature": 0, "max_tokens": tokens, "ignore_eos": True, **given})
    for name, prompt in prompts.items():
        llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, params)
    done = {}
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            if output.finished:
                done[output.request_id] = output
    return done


def answer(output: Any) -> list[int]:
    return list(output.outputs[0].token_ids)


def served(llm: Any, log: Log, prompts: dict[str, list[int]], **given: Any) -> dict[str, Any]:
    """As `serve`, every answer checked."""
    outputs = serve(llm, prompts, **given)
    for name, prompt in prompts.items():
        check(llm, prompt, answer(outputs[name]), log.admissions[name], DOCUMENT)
    return outputs


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with engine(tmp_path_factory.mktemp("checkpoint")) as made:
        yield made


@pytest.fixture
def log(llm: Any) -> Iterator[Log]:
    scheduler = scheduler_of(llm)
    assert scheduler.reset_prefix_cache()
    budget, log = scheduler.max_num_scheduled_tokens, Log(scheduler)
    serve(llm, {"document": [*DOCUMENT, 20]}, tokens=1)
    yield log
    del scheduler.schedule
    scheduler.max_num_scheduled_tokens = budget


def prefixes() -> dict[str, list[int]]:
    """Hits of no token, a window, one more or less, one past a block, all of the prompt, with any suffix."""
    lengths = (0, 15, 16, 17, 31, 32, 33, 48, 49, 64, 95, 111)
    prompts = {f"at {n}": DOCUMENT[:n] + ids(1 + n % 23, seed=n) for n in lengths}
    return prompts | {f"whole {n}": DOCUMENT[:n] for n in (16, 32, 33, 64, 112)}


@pytest.mark.parametrize("budget", [5, 17, 64, 1000])
def test_hits_of_any_length_in_chunks_and_in_company(llm: Any, log: Log, budget: int) -> None:
    scheduler = scheduler_of(llm)
    scheduler.max_num_scheduled_tokens = budget
    pages = [
        (store, store.kv_cache.clone())
        for name, store in llm.llm_engine.vllm_config.compilation_config.static_forward_context.items()
        if name.endswith("entries")
    ]
    pool = scheduler.kv_cache_manager.block_pool
    cached = torch.tensor([block.block_id for block in pool.blocks if block.block_hash is not None])
    served(llm, log, prefixes())
    for store, before in pages:
        bits = (page[cached].contiguous().view(torch.int16) for page in (before, store.kv_cache))
        assert torch.equal(*bits), "a cached entry was written again"
    hits = {name: log.admissions[name][0].hit for name in prefixes()}
    assert hits["at 16"] == hits["at 31"] == hits["whole 32"] == 0, "a hit of a window is not replayed"
    assert hits["at 32"] == hits["at 33"] == hits["whole 33"] == 32 and hits["at 111"] == 96
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


def test_a_hit_that_does_not_pay_is_declined(llm: Any, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_deepinfer.policy.step_cost import StepCost

    scheduler = scheduler_of(llm)
    monkeypatch.setattr(scheduler, "replay_cost", lambda: StepCost(0.01, 1e-4, tile=128))
    before = scheduler._ledger.counts.declined_hits
    served(llm, log, {"short": DOCUMENT[:33] + ids(5, seed=9)})
    assert log.admissions["short"][0].hit == 0
    assert scheduler._ledger.counts.declined_hits == before + 1


def test_prompt_logprobs_keep_every_row(llm: Any, log: Log) -> None:
    prompt = DOCUMENT[:64] + ids(10, seed=3)
    output = serve(llm, {"all": prompt}, prompt_logprobs=0)["all"]
    hidden, _ = literal(model_of(llm), torch.tensor(prompt))
    with torch.no_grad():
        wanted = model_of(llm).logits(hidden[:-1]).log_softmax(-1)
    entries = zip(output.prompt_logprobs[1:], prompt[1:], strict=True)
    found = [entry[token].logprob for entry, token in entries]
    torch.testing.assert_close(torch.tensor(found), wanted[range(73), prompt[1:]], atol=1e-4, rtol=1e-4)


def test_a_request_that_is_preempted_in_its_replay(llm: Any, log: Log) -> None:
    from vllm import SamplingParams

    scheduler, core = scheduler_of(llm), llm.llm_engine
    scheduler.max_num_scheduled_tokens = 7
    prompt = DOCUMENT[:64] + ids(9, seed=4)
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    core.add_request("again", {"prompt_token_ids": prompt}, params)
    done: list[int] = []
    for step in range(100):
        if step in (1, 5) and scheduler.running:
            request = scheduler.running.pop()
            scheduler._preempt_request(request, time.monotonic())
            scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
        for output in core.step():
            done = answer(output) if output.finished else done
        if done:
            break
    assert len(log.admissions["again"]) == 3
    check(llm, prompt, done, log.admissions["again"], DOCUMENT)


@more
def test_restored_windows(tmp_path: Path) -> None:
    """A conversation's next turn, and a preemption, go on exactly where they were: no token is replayed."""
    prompt = DOCUMENT + ids(30, seed=5)
    with engine(tmp_path, deepinfer={"window_tier_mib": 1}) as llm:
        scheduler, log = scheduler_of(llm), Log(scheduler_of(llm))
        whole = prompt + answer(serve(llm, {"turn": prompt}, tokens=40)["turn"])
        counts = scheduler._ledger.counts
        before, replayed = counts.restored_windows, counts.replayed_tokens
        last = len(whole) // BLOCK * BLOCK
        turn = whole[:last] + ids(20, seed=6)
        serve(llm, {"next": turn})
        assert counts.restored_windows == before + 1 and counts.replayed_tokens == replayed
        assert log.loads == counts.restored_windows
        assert log.admissions["next"][0].hit == 0, "nothing is suppressed: the request begins behind its hit"
        scheduler._now = lambda: time.monotonic() + 400  # longer than windows are kept
        serve(llm, {"late": whole[:last] + ids(20, seed=8)})
        assert counts.restored_windows == before + 1 and counts.replayed_tokens == replayed + WINDOW
        kept = counts.kept_windows
        assert kept > 0 and len(scheduler._windows) > 0
        assert scheduler.reset_prefix_cache() and len(scheduler._windows) == 0
        pool = scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


@more
def test_a_preempted_request_gets_its_windows_back(tmp_path: Path) -> None:
    from vllm import SamplingParams

    prompt, answers = DOCUMENT + ids(30, seed=7), []
    with engine(tmp_path, deepinfer={"window_tier_mib": 1}) as llm:
        scheduler, core = scheduler_of(llm), llm.llm_engine
        for preempts in (False, True):
            assert scheduler.reset_prefix_cache()
            params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
            core.add_request(f"p{preempts}", {"prompt_token_ids": prompt}, params)
            for step in range(200):
                if preempts and step in (10, 25):
                    request = scheduler.running.pop()
                    scheduler._preempt_request(request, time.monotonic())
                    scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
                outputs = core.step()
                if outputs and outputs[0].finished:
                    answers.append(answer(outputs[0]))
                    break
        assert scheduler._ledger.counts.restored_windows == 2
    assert answers[0] == answers[1], "a preemption changes nothing"


@more
def test_the_time_budget_scheduler_charges_replays(tmp_path: Path) -> None:
    name = "vllm_deepinfer_plugins.scheduler.TimeBudgetScheduler"
    with engine(tmp_path, scheduler_cls=name, deepinfer={"itl_target_ms": 40.0}) as llm:
        log = Log(scheduler_of(llm))
        serve(llm, {"document": [*DOCUMENT, 20]}, tokens=1)
        scheduler, charged = scheduler_of(llm), []
        record = scheduler._record

        def noting(step: Any, output: Any) -> Any:
            made = record(step, output)
            charged.append(sum(made.chunks))
            return made

        scheduler._record = noting
        served(llm, log, {"hit": DOCUMENT[:64] + ids(9, seed=8)})
        assert log.admissions["hit"][0].hit == 64
        assert sum(charged) == 9 + WINDOW


@more
@pytest.mark.parametrize("drafts", [3, 20])
def test_speculation_changes_no_token(tmp_path: Path, drafts: int) -> None:
    """n-gram drafts over a prompt that repeats itself, beside replays and trimmed rows; also drafts that go
    further ahead than a window. In a process of its own: vLLM starts no second engine beside numba."""
    command = [sys.executable, "-m", "tests.plugins.replay.speculation", str(tmp_path), str(drafts)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["off"] == found["on"]
    assert found["hit"] == 112 and found["steps with drafts"] > 0


@more
def test_prefixes_from_a_connector(tmp_path: Path) -> None:
    """At once and asynchronously, in whole blocks and not; a hit that ends inside a block is rounded down."""
    transfer = {
        "kv_connector": "EntriesConnector",
        "kv_connector_module_path": entries_connector.__name__,
        "kv_role": "kv_both",
    }
    with engine(tmp_path, kv_transfer_config=transfer) as llm:
        log = Log(scheduler_of(llm))
        entries_connector.DOCUMENTS[tuple(DOCUMENT)] = cold_entries(llm, tuple(DOCUMENT))
        prompts = {}
        for hit in (15, 16, 17, 31, 32, 33, 47, 63, 64, 80, 111):
            for late in (False, True):
                name = f"{hit} {late}"
                prompts[name] = DOCUMENT[:hit] + ids(4 + hit % 5, seed=hit + 200 * late)
                entries_connector.HITS[name] = hit
                entries_connector.ASYNC |= {name} if late else set()
        for name, prompt in prompts.items():  # one at a time: local hits would come before the connector's
            assert scheduler_of(llm).reset_prefix_cache()
            served(llm, log, {name: prompt})
            wanted = int(name.split()[0]) // BLOCK * BLOCK
            assert log.admissions[name][0].hit == (wanted if wanted > WINDOW else 0)
        pool = scheduler_of(llm).kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


def test_sizes_of_this_engine(llm: Any) -> None:
    assert Sizes.of(model_of(llm).config) == Sizes(WINDOW, WINDOW + 2, 3)
    assert ON["encoder_replay"] and ON["decoder_replay"]
