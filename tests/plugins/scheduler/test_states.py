"""Both schedulers without a model: random requests, aborts and preemptions; two steps in flight."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.plugins.scheduler.harness import COST, Watch, tiny, use_model_clock

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with tiny(tmp_path_factory.mktemp("models"), block_size=32, enable_prefix_caching=False) as made:
        yield made


def scheduler(
    llm: Any, tmp_path: Path, name: str, *, blocks: int | None = None, target: float = 12.0, **more: Any
) -> Any:
    """A fresh one of the class of that name, over `blocks` KV blocks."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import RequestStatus
    from vllm_deepinfer_plugins import scheduler as ours
    from vllm_deepinfer_plugins.scheduler.bench.swap import swap

    core = llm.llm_engine.engine_core.engine_core
    classes = {"Scheduler": Scheduler, "AsyncScheduler": AsyncScheduler}
    core.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    before = core.scheduler.kv_cache_config
    if blocks is not None:
        core.scheduler.kv_cache_config = copy.copy(before)
        core.scheduler.kv_cache_config.num_blocks = blocks
    deepinfer = {"itl_target_ms": target, "step_cost_file": str(tmp_path / "fit.json")}
    mode = {"async_scheduling": "Async" in name}
    made = swap(core, classes.get(name) or getattr(ours, name), deepinfer=deepinfer, **mode, **more)
    core.scheduler.kv_cache_config = before
    made.finished_req_ids.clear()
    if name not in classes:
        use_model_clock(made)
    return made


PAIRS = [("Scheduler", "TimeBudgetScheduler", 1), ("AsyncScheduler", "AsyncTimeBudgetScheduler", 2)]


@pytest.mark.parametrize(("stock", "ours", "ahead"), PAIRS, ids=["sync", "async"])
@pytest.mark.parametrize("blocks", [None, 40], ids=["enough KV", "preemption"])
def test_every_request_gets_its_tokens(
    llm: Any, tmp_path: Path, stock: str, ours: str, ahead: int, blocks: int | None
) -> None:
    from tests.plugins.scheduler.no_model import Drive, request

    wanted = {}
    lengths = {}
    for name in (stock, ours):
        drive, rng = Drive(scheduler(llm, tmp_path, name, blocks=blocks), ahead), random.Random(3)
        for number in range(60):
            prompt, tokens = rng.randrange(1, 400), rng.randrange(1, 60)
            wanted[str(number)] = tokens
            drive.scheduler.add_request(request(str(number), prompt, tokens, arrival=0.01 * number))
            for _ in range(rng.randrange(3)):
                drive.step()
        drive.finish()
        lengths[name] = {key: len(answer) for key, answer in drive.answers.items()}
    assert lengths[ours] == lengths[stock] == wanted


def test_steps_overlap_and_still_keep_their_budget(llm: Any, tmp_path: Path) -> None:
    from tests.plugins.scheduler.no_model import Drive, request

    made = scheduler(llm, tmp_path, "AsyncTimeBudgetScheduler")
    watch = Watch(made)
    drive, records = Drive(made, ahead=2), watch.records
    for number in range(4):
        made.add_request(request(str(number), 5, 80))
    for _ in range(4):
        drive.step()
    made.add_request(request("long", 480, 1))
    drive.finish()
    limited = [r for r in records if r.chunks and r.decodes]
    assert len(limited) >= 5
    assert all(r.predicted <= r.budget * (1 + 1e-9) for r in limited)
    assert all(r.decodes == 4 for r in limited)


@pytest.mark.parametrize("seed", range(6))
def test_aborts_at_any_time_leave_nothing_behind(llm: Any, tmp_path: Path, seed: int) -> None:
    """Random arrivals, aborts and little KV; at the end every block is free and nothing is remembered."""
    from tests.plugins.scheduler.no_model import Drive, request

    rng = random.Random(seed)
    made = scheduler(llm, tmp_path, "TimeBudgetScheduler", blocks=48, policy=["fcfs", "priority"][seed % 2])
    drive, alive = Drive(made), []
    for number in range(80):
        if rng.random() < 0.5:
            name = str(number)
            made.add_request(
                request(name, rng.randrange(1, 450), rng.randrange(1, 50), number, rng.randrange(3))
            )
            alive.append(name)
        if alive and rng.random() < 0.25:
            drive.abort(alive.pop(rng.randrange(len(alive))))
        drive.step()
    drive.finish()
    assert not made.running and not made.waiting and not made.kv_holding_waiting
    pool = made.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == 48 - 1  # one is vLLM's null block
    assert not made._planner._targets and not made._planner._cached
    assert not made._meter._in_flight


@pytest.mark.parametrize("decodes", [1, 8])
def test_no_decode_misses_a_step_while_a_prompt_is_prefilled(llm: Any, tmp_path: Path, decodes: int) -> None:
    """Bug class 32: a token per step, whatever comes in."""
    from tests.plugins.scheduler.no_model import Drive, request

    made = scheduler(llm, tmp_path, "TimeBudgetScheduler")
    drive = Drive(made)
    for number in range(decodes):
        made.add_request(request(f"d{number}", 5, 120))
    drive.step()
    for number in range(6):
        made.add_request(request(f"p{number}", 480, 1))
        for _ in range(3):
            drive.step()
    drive.finish()
    assert all(set(drive.gaps[f"d{number}"]) == {1} for number in range(decodes))


def test_a_stream_of_short_prompts_does_not_starve_a_long_one(llm: Any, tmp_path: Path) -> None:
    """The ageing bound, in vLLM's own loops: shorts arrive as fast as they can be served."""
    from tests.plugins.scheduler.no_model import Drive, request

    made = scheduler(llm, tmp_path, "TimeBudgetScheduler")
    drive = Drive(made)
    made.add_request(request("decode", 5, 450))
    drive.step()
    made.add_request(request("long", 480, 1, arrival=made._clock()))
    long_work = COST.seconds(COST.features(work(480)))
    ended = None
    for number in range(440):
        made.add_request(request(f"s{number}", 64, 1, arrival=made._clock()))
        drive.step()
        if "long" in drive.answers and ended is None:
            ended = made._clock()
    assert ended is not None
    first_come = made._clock()
    assert ended <= 8 * long_work + 2 * long_work + 0.2 < first_come
    short_first = [key for key in drive.answers if key.startswith("s")]
    assert len(short_first) > 10


def work(tokens: int) -> Any:
    from vllm_deepinfer.policy.step_cost import Work

    return Work(0, prefill_tokens=tokens)
