"""Skewed and bursty traffic, drawn once and replayed to every policy.

The shape is that of published agentic traffic, every prompt in units of `SCALE` tokens (see README.md):
inputs with a median of 67,600 tokens and 1 % beyond 450,000, outputs with a median of 444 tokens, which are
126 steps with 3.51 tokens accepted per step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

SCALE = 16
MEDIAN_PROMPT, SIGMA_PROMPT, MOST_PROMPT = 67_600, 0.815, 450_000
MEDIAN_ANSWER, SIGMA_ANSWER, MOST_ANSWER = 126, 0.8, 252
SESSIONS = 64


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request.

    Attributes:
        at: seconds from the start of the trace.
        prompt_tokens, answer_tokens: sizes, of the simulated engines' tokens.
        session: whose prompts begin alike; a few are hot.
    """

    at: float
    prompt_tokens: int
    answer_tokens: int
    session: int


@dataclass(frozen=True, slots=True)
class Shape:
    """What to draw.

    Attributes:
        rate: requests per second on average. seconds: length of the trace.
        fan_out: share of arrivals that bring 2 to 7 further requests in the same instant, as an agent that
            starts subagents does.
    """

    rate: float
    seconds: float
    fan_out: float = 0.1

    def __post_init__(self) -> None:
        if not (self.rate > 0 and self.seconds > 0 and 0 <= self.fan_out <= 1):
            raise ValueError(f"a trace needs a rate and a length above 0, and a share of fan-outs: {self}.")


def draw(shape: Shape, seed: int) -> list[Arrival]:
    """The arrivals in order of time; the same seed gives the same ones."""
    rng, at, arrivals = Random(seed), 0.0, list[Arrival]()
    mean_group = 1 + shape.fan_out * (2 + 7) / 2
    while True:
        at += rng.expovariate(shape.rate / mean_group)
        if at >= shape.seconds:
            return arrivals
        session = min(int(rng.paretovariate(1.0)), SESSIONS) - 1  # Zipf: half of all arrivals are the first's
        group = 1 + (rng.randint(2, 7) if rng.random() < shape.fan_out else 0)
        for _ in range(group):
            prompt = rng.lognormvariate(math.log(MEDIAN_PROMPT), SIGMA_PROMPT)
            answer = rng.lognormvariate(math.log(MEDIAN_ANSWER), SIGMA_ANSWER)
            arrivals.append(
                Arrival(
                    at,
                    max(16, round(min(prompt, MOST_PROMPT) / SCALE)),
                    max(2, round(min(answer, MOST_ANSWER))),
                    session,
                )
            )
