"""From vLLM's requests to the policy and back: who runs, who waits, what a step may take, who gets it."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from vllm.v1.request import Request, RequestStatus

from vllm_deepinfer.policy.itl_control import ItlControl
from vllm_deepinfer.policy.prefill_budget import Patience, Prefill, StepBudget, plan
from vllm_deepinfer.policy.prefill_order import Claim, Order, Rank, rank
from vllm_deepinfer.policy.step_cost import Features, StepCost, Work
from vllm_deepinfer.policy.step_cost_learner import StepCostLearner

from .step import Step
from .targets import NONE, Targets, targets_of
from .waiting import RankedQueue

LOOK_AHEAD = 8  # waiting requests that a plan considers: more never fit beside one another
HOLD = 8  # steps for which nothing is reserved for waiting requests after vLLM could not admit one

PROBES = 32  # first steps with prefill, which take a few sizes of chunk in turn so that a fit has slopes
LADDER = (1, 4, 2, 8, 16, 3, 6, 12)  # tiles


@dataclass(frozen=True, slots=True)
class Survey:
    """The running requests.

    Attributes:
        decodes: features of those that decode.
        decode_tokens: tokens that they schedule, drafts included.
        prefills: those that do not: request, tokens computed, tokens left.
        itl_target: the tightest that one of the decodes asked for itself, in seconds.
    """

    decodes: Features
    decode_tokens: int
    prefills: list[tuple[Request, int, int]]
    itl_target: float | None


class Planner:
    """Plans steps. Holds what it remembers of requests, and nothing of vLLM's.

    Attributes:
        ignored_targets: values that requests carried and that are no targets.
    """

    def __init__(
        self,
        learner: StepCostLearner,
        control: ItlControl,
        order: Order,
        target: float | None,
        budget: float | None,
        by_priority: bool,
        most_decode: int,
    ) -> None:
        """
        Args:
            learner, control: of the meter, which teaches them.
            order: who goes first.
            target: ITL in seconds that a step's budget follows from; None: `budget` is given, in seconds.
            by_priority: vLLM's own policy is by priority, which then always comes first.
            most_decode: tokens that a request may schedule and still be one that decodes: 1 + drafts.
        """
        self._learner, self._control = learner, control
        self._order = Order.PRIORITY if by_priority and order is Order.FCFS else order
        self._target, self._fixed = target, budget
        self._by_priority = by_priority or order is Order.PRIORITY
        self._most_decode = most_decode
        self._targets: dict[str, Targets] = {}
        self._cached: dict[str, int] = {}
        self._hold = self._probes = 0
        self.patience = Patience()
        self.ignored_targets = 0

    def expect(self, request: Request, cached: int) -> None:
        """A request comes in; `cached` tokens of it are in the prefix cache."""
        targets = targets_of(request)
        self.ignored_targets += len(targets.ignored)
        if targets.ttft or targets.itl:
            self._targets[request.request_id] = targets
        if cached:
            self._cached[request.request_id] = cached

    def decodes_limit(self) -> float:
        """Seconds that decodes and their drafts may take in the next step.

        Of requests' own targets the tightest counts, whether it decodes already or not. Drafts make room for
        the smallest chunk of a prompt that has got nothing for too long.
        """
        own = [targets.itl for targets in self._targets.values() if targets.itl]
        limit = self._limit(min(own, default=None))
        if self.patience.exhausted and self._learner.usable:
            cost = self._learner.cost()
            limit -= cost.per_token * cost.tile
        return limit

    def prefill_weight(self) -> float:
        """What a second of prefill is worth beside one of decoding: more with each step that left it none."""
        return 1.0 + self.patience.stalled

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        self._targets.pop(request_id, None)
        self._cached.pop(request_id, None)

    def rank(self, request: Request) -> Rank:
        """Where a waiting request stands."""
        return self._rank(request, *self._extent(request))

    def prepare(
        self, running: Iterable[Request], queues: tuple[Iterable[Request], RankedQueue], most_tokens: int
    ) -> tuple[Step, list[Prefill]]:
        """What the next step may hold, and the prefills in their order, up to the last that was considered.

        Args:
            running: vLLM's running requests.
            queues: those that wait with KV loaded for them, and the others.
            most_tokens: that a step may schedule.
        """
        cost = self._learner.cost()
        survey = self._survey(running, cost)
        left = max(most_tokens - survey.decode_tokens, 0)
        decodes = int(survey.decodes.decodes)
        if not self._learner.usable:
            left = min(left, self._probe(cost.tile)) if self._probes < PROBES else left
            return Step(StepBudget(cost, survey.decodes, math.inf, left), None, False, decodes, math.inf), []
        limit = self._limit(survey.itl_target) if decodes else math.inf
        order: list[Prefill] = []  # as far as the plan looks: the rest of the queue costs nothing
        forced = self.patience.exhausted and limit < math.inf
        ranked = _noting(self._in_order(survey.prefills, queues), order)
        planned = plan(StepBudget(cost, survey.decodes, limit, left), ranked, cost.tile if forced else 0)
        return Step(StepBudget(cost, survey.decodes, limit, left), planned, forced, decodes, limit), order

    def settle(self, step: Step, order: list[Prefill], scheduled: Callable[[str], bool]) -> None:
        """vLLM has put the step together: remember what came of the plan."""
        if step.chunks:
            self._probes += 1
        self._hold = max(self._hold - 1, 0)
        if step.plan is None:
            return
        if any(key not in step.chunks and not scheduled(key) for key in step.plan):
            self._hold = HOLD
        first = bool(order) and scheduled(order[0].key)
        over = bool(step.chunks) and step.live.predicted > step.limit * (1 + 1e-9)
        self.patience.note(bool(order), first, over)

    def _survey(self, running: Iterable[Request], cost: StepCost) -> Survey:
        decodes = drafts = 0
        contexts = 0.0
        drafted = Features()
        prefills, targets, tightest = [], self._targets, math.inf
        attention = cost.attention
        bounded = attention.span < math.inf
        for request in running:
            computed = request.num_computed_tokens
            new = request.num_tokens_with_spec + request.num_output_placeholders - computed
            if new > self._most_decode:
                prefills.append((request, computed, new))
            elif new > 0:
                decodes += 1
                contexts += attention.scanned(computed) if bounded else computed
                if new > 1:
                    drafts += new - 1
                    drafted = drafted + cost.features(Work(computed, draft_tokens=new - 1))
                if targets and (own := targets.get(request.request_id, NONE).itl):
                    tightest = min(tightest, own)
        features = Features(drafts, drafted.attended, decodes, contexts)
        return Survey(features, decodes + drafts, prefills, tightest if tightest < math.inf else None)

    def _limit(self, asked: float | None) -> float:
        """Seconds that a step with decodes may take."""
        target = min((t for t in (self._target, asked) if t is not None), default=None)
        budgets = [self._control.budget(target)] if target is not None else []
        if self._fixed is not None:
            budgets.append(self._fixed)
        return min(budgets)

    def _probe(self, tile: int) -> int:
        return LADDER[self._probes % len(LADDER)] * tile

    def _in_order(
        self,
        prefills: list[tuple[Request, int, int]],
        queues: tuple[Iterable[Request], RankedQueue],
    ) -> Iterator[Prefill]:
        """Running and waiting prefills by rank, one at a time."""
        here = sorted(
            ((self._rank(r, x, n), Prefill(r.request_id, x, n)) for r, x, n in prefills),
            key=lambda entry: entry[0],
        )
        there = self._waiting(queues) if not (self._hold and here) else iter(())
        merged = heapq.merge(here, there, key=lambda entry: entry[0]) if here else there
        return (prefill for _, prefill in merged)

    def _waiting(self, queues: tuple[Iterable[Request], RankedQueue]) -> Iterator[tuple[Rank, Prefill]]:
        holding, waiting = queues
        entries = sorted(
            (
                (self._rank(r, x, n), Prefill(r.request_id, x, n))
                for r, x, n in map(self._with_extent, holding)
            ),
            key=lambda entry: entry[0],
        )
        yield from entries
        for looked, (rank_, request) in enumerate(waiting.ranked()):
            if looked == LOOK_AHEAD:
                return
            if request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
                context, tokens = self._extent(request)
                yield rank_, Prefill(request.request_id, context, tokens)

    def _with_extent(self, request: Request) -> tuple[Request, int, int]:
        return (request, *self._extent(request))

    def _extent(self, request: Request) -> tuple[int, int]:
        """Tokens that need not be computed, as far as known, and those that must; at least one must."""
        total = request.num_tokens
        context = max(request.num_computed_tokens, self._cached.get(request.request_id, 0))
        context = min(context, total - 1)
        return context, total - context

    def _rank(self, request: Request, context: int, tokens: int) -> Rank:
        order, work = self._order, 0.0
        if self._learner.usable:
            cost = self._learner.fitted
            work = cost.seconds(cost.features(Work(context, prefill_tokens=tokens)))
        elif order is Order.SHORTEST:
            order = Order.PRIORITY if self._by_priority else Order.FCFS
        claim = Claim(
            arrival=request.arrival_time,
            work=work,
            priority=request.priority if self._by_priority else 0,
            resumed=request.status == RequestStatus.PREEMPTED,
            ttft_target=self._targets.get(request.request_id, NONE).ttft,
        )
        return rank(claim, order)


def _noting(prefills: Iterator[Prefill], seen: list[Prefill]) -> Iterator[Prefill]:
    for prefill in prefills:
        seen.append(prefill)
        yield prefill
