"""A day of AgentX-shaped traffic: coding agents with subagents, chat, and one-off prompts.

Shape after the published corpus (393 traces; median request 142,016 tokens in, 444 out; 44 % of sessions have
subagents): contexts that grow by some thousand tokens per turn, tools that answer in seconds, people who
answer in minutes, some who come back after hours. The corpus caps pauses at 300 s; a store for days must see
the long ones, so 3 % of an agent's pauses are hours (median 2 h). Our own numbers are marked so in `Shape`.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator
from dataclasses import dataclass

DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Shape:
    """What the generator draws from.

    Attributes:
        sessions: Agent sessions that begin per day.
        chats: Chat sessions that begin per day (ours).
        one_offs: Prompts per day that never come back (ours).
        applications: Agents with a system prompt of their own (ours).
        system_tokens: System prompt and tools.
        turns: Median turns of a session; log-normal with `turns_sigma`.
        growth: Median tokens per turn, answer included.
        context_limit: A session is summarised and goes on from its system prompt beyond this (ours).
        subagents: Part of the sessions that start subagents.
        long_pause: Part of the pauses that last hours (ours).
    """

    sessions: int = 300
    chats: int = 300
    one_offs: int = 3_000
    applications: int = 5
    system_tokens: int = 20_000
    turns: int = 60
    turns_sigma: float = 0.7
    growth: int = 2_600
    growth_sigma: float = 1.0
    context_limit: int = 400_000
    subagents: float = 0.44
    long_pause: float = 0.03


@dataclass(frozen=True, slots=True)
class Turn:
    """One request.

    Attributes:
        time: Seconds from the start of the day.
        prefix: Identity of the token sequence: requests with the same prefix share tokens up to the shorter.
        shared: Tokens at its beginning that come from `shared_with`.
        shared_with: Identity of what they are shared with, such as an application's system prompt.
        tokens: Length of the prompt.
        answer: Generated tokens.
        kind: "agent", "chat" or "once".
    """

    time: float
    prefix: int
    shared: int
    shared_with: int
    tokens: int
    answer: int
    kind: str


def day(shape: Shape, seed: int = 0) -> list[Turn]:
    """The requests of 24 hours in order of time."""
    rng = random.Random(seed)
    ids = iter(range(1_000, 10**9))
    streams: list[Iterator[Turn]] = []
    for _ in range(shape.sessions):
        streams.append(_agent(shape, rng.random() * DAY_S, random.Random(rng.random()), ids))
    for _ in range(shape.chats):
        streams.append(_chat(rng.random() * DAY_S, random.Random(rng.random()), ids))
    streams += [iter([_once(rng, next(ids))]) for _ in range(shape.one_offs)]
    return [turn for turn in heapq.merge(*streams, key=lambda turn: turn.time) if turn.time < DAY_S]


def _agent(shape: Shape, start: float, rng: random.Random, ids: Iterator[int]) -> Iterator[Turn]:
    application = rng.randrange(shape.applications)
    prefix, now = next(ids), start
    context = shape.system_tokens + _log_normal(rng, 4_000, 1.0)
    with_subagents = rng.random() < shape.subagents
    pending: list[Turn] = []
    for _ in range(max(1, int(_log_normal(rng, shape.turns, shape.turns_sigma)))):
        while pending and pending[0].time <= now:
            yield pending.pop(0)
        answer = _log_normal(rng, 444, 1.0)
        yield Turn(now, prefix, shape.system_tokens, application, context, answer, "agent")
        if with_subagents and rng.random() < 0.06:
            pending = sorted([*pending, *_subagent(now, application, rng, ids)], key=lambda turn: turn.time)
        context += answer + _log_normal(rng, shape.growth, shape.growth_sigma)
        now += _pause(shape, rng)
        if context > shape.context_limit:
            prefix, context = next(ids), shape.system_tokens + _log_normal(rng, 8_000, 0.5)
    yield from pending


def _subagent(start: float, application: int, rng: random.Random, ids: Iterator[int]) -> list[Turn]:
    prefix, now, context, turns = next(ids), start, 8_000 + _log_normal(rng, 2_000, 1.0), list[Turn]()
    for _ in range(max(1, int(_log_normal(rng, 10, 0.6)))):
        answer = _log_normal(rng, 300, 1.0)
        turns.append(Turn(now, prefix, 8_000, 100 + application, context, answer, "agent"))
        context += answer + _log_normal(rng, 2_000, 1.0)
        now += 2 + rng.expovariate(1 / 6)
    return turns


def _chat(start: float, rng: random.Random, ids: Iterator[int]) -> Iterator[Turn]:
    prefix, now, context = next(ids), start, 500 + _log_normal(rng, 300, 1.0)
    for _ in range(max(1, int(_log_normal(rng, 4, 0.8)))):
        answer = _log_normal(rng, 400, 0.8)
        yield Turn(now, prefix, 400, 200, context, answer, "chat")
        context += answer + _log_normal(rng, 150, 1.0)
        now += 20 + rng.expovariate(1 / 120) if rng.random() > 0.1 else _log_normal(rng, 3 * 3_600, 1.0)


def _once(rng: random.Random, prefix: int) -> Turn:
    return Turn(rng.random() * DAY_S, prefix, 0, 300, _log_normal(rng, 3_000, 1.0), 200, "once")


def _pause(shape: Shape, rng: random.Random) -> float:
    kind = rng.random()
    if kind < shape.long_pause:
        return _log_normal(rng, 2 * 3_600, 1.0)
    if kind < 0.15:
        return 10 + rng.expovariate(1 / 90)  # a person reads and answers
    return 2 + rng.expovariate(1 / 8)  # generation and a tool


def _log_normal(rng: random.Random, median: float, sigma: float) -> int:
    return max(1, int(median * rng.lognormvariate(0.0, sigma)))
