"""The pause finds the better of drafting and not drafting, and what it tries costs little."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_deepinfer.policy.verification_pause import Pause, PauseRule


@dataclass
class Engine:
    """Steps with known times.

    Attributes:
        drafting, verifying: seconds that they add to a step. accepted: tokens that a request gains by drafts.
    """

    decodes: int = 4
    bare: float = 0.010
    drafting: float = 0.002
    verifying: float = 0.003
    accepted: float = 1.0

    def run(self, pause: Pause, steps: int) -> tuple[float, int]:
        """Tokens per second, and how many steps drafted."""
        seconds = tokens = 0.0
        drafted, count = False, 0
        for _ in range(steps):
            worth = self.rate(drafts=True) > self.decodes / (self.bare + self.drafting)
            if drafted:
                plain = self.bare + self.drafting
                pause.decided(self.decodes, plain, max(self.rate(drafts=True), self.decodes / plain))
            drafts = pause.drafts(self.decodes)
            verified = drafted and worth
            took = self.bare + self.drafting * drafts + self.verifying * verified
            if not drafts and not drafted:
                pause.took(self.decodes, self.bare + self.drafting, took)
            seconds += took
            tokens += self.decodes * (1 + self.accepted * verified)
            drafted, count = drafts, count + drafts
        return tokens / seconds, count

    def rate(self, drafts: bool) -> float:
        """Always drafting and verifying, or never."""
        if not drafts:
            return self.decodes / self.bare
        return self.decodes * (1 + self.accepted) / (self.bare + self.drafting + self.verifying)

    def best(self) -> float:
        return max(self.rate(drafts=False), self.rate(drafts=True))


@given(
    decodes=st.integers(1, 300),
    drafting=st.floats(0.0001, 0.01),
    verifying=st.floats(0.0, 0.01),
    accepted=st.floats(0.0, 4.0),
)
def test_hardly_worse_than_the_better_of_both(
    decodes: int, drafting: float, verifying: float, accepted: float
) -> None:
    engine = Engine(decodes, drafting=drafting, verifying=verifying, accepted=accepted)
    pause = Pause()
    engine.run(pause, 400)  # until it knows
    rate, _ = engine.run(pause, 4000)
    assert rate >= 0.955 * engine.best(), "min_gain, a look every 128 steps, a try every 1,024"


def test_where_drafts_pay_it_hardly_ever_pauses() -> None:
    _, drafted = Engine(accepted=2.0).run(Pause(), 4000)
    assert drafted > 3980


def test_where_they_do_not_it_hardly_ever_drafts() -> None:
    engine = Engine(accepted=0.1)
    rate, drafted = engine.run(Pause(), 4000)
    assert drafted < 260 and rate > 0.98 * engine.best()


def test_pauses_grow_and_end_when_drafts_pay_again() -> None:
    pause, engine = Pause(), Engine(accepted=0.1)
    engine.run(pause, 2000)
    engine.accepted = 2.0
    rate, _ = engine.run(pause, 200)
    assert rate < engine.best() * 0.9, "the pause was long"
    rate, _ = engine.run(pause, 1000)
    assert rate > 0.99 * engine.best()


def test_another_batch_is_looked_at_anew() -> None:
    pause, engine = Pause(), Engine(accepted=0.1)
    engine.run(pause, 2000)
    assert not pause.drafts(4)
    said = [pause.drafts(32) for _ in range(20)]
    assert said == [False] * 3 + [True] * 17, "a try, and not the long pause: 4 requests say nothing of 32"


@pytest.mark.parametrize("accepted", [0.1, 2.0])
def test_batches_that_change_all_the_time(accepted: float) -> None:
    """Requests come and go: what is known of other sizes counts, and tries stay few."""
    rng, pause, engine = random.Random(0), Pause(), Engine(accepted=accepted)
    tokens = seconds = best = 0.0
    for _ in range(600):
        engine.decodes = min(max(engine.decodes + rng.randint(-3, 3), 1), 64)
        engine.drafting, engine.bare = 0.002 + 1e-5 * engine.decodes, 0.010 + 1e-4 * engine.decodes
        steps = rng.randint(1, 20)
        rate, _ = engine.run(pause, steps)
        took = steps * engine.decodes / rate
        tokens, seconds = tokens + rate * took, seconds + took
        best += engine.best() * took
    assert tokens > 0.93 * best


def test_nothing_pauses_before_a_share_is_known() -> None:
    rule = PauseRule(unknown=10, tries=2)
    pause = Pause(rule)
    said = []
    for _ in range(14):
        pause.decided(4, plain=0.01, rate=1.0)  # drafting is never worth it
        said.append(pause.drafts(4))
    assert said == [True] * 10 + [False] * 2 + [True] * 2, "and not again at once"
    pause.took(4, predicted=0.012, seconds=0.010)
    for _ in range(rule.votes):
        pause.decided(4, plain=0.012, rate=1.0)
    assert [pause.drafts(4) for _ in range(rule.first + 1)] == [False] * rule.first + [True]


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_times_that_are_none_teach_nothing(bad: float) -> None:
    pause = Pause()
    assert pause.drafts(4)
    pause.took(4, predicted=bad, seconds=0.01)
    pause.took(4, predicted=0.01, seconds=bad)
    for _ in range(10):
        pause.decided(4, plain=1.0, rate=0.001)
    assert pause.drafts(4), "no share is known"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"min_gain": -0.1}, "min_gain"),
        ({"min_gain": float("nan")}, "min_gain"),
        ({"votes": 0}, "at least 1 step"),
        ({"longest": 8}, "longest"),
        ({"stale": 3}, "stale"),
    ],
)
def test_rules_that_make_no_sense(wrong: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        PauseRule(**wrong)  # type: ignore[arg-type]
