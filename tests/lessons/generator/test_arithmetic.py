"""Scratch pads are right, for every pair."""

import re

from vllm_deepinfer.lessons.generator.arithmetic import scratch_minus, scratch_plus

EQUATION = re.compile(r"(\d+(?: [+-] \d+)+) = (\d+)")


def equations_hold(text: str) -> bool:
    found = EQUATION.findall(text)
    for left, right in found:
        total, sign = 0, 1
        for part in left.split():
            if part in "+-":
                sign = 1 if part == "+" else -1
            else:
                total += sign * int(part)
        if total != int(right):
            return False
    return bool(found)


def test_every_step_of_every_sum_is_right() -> None:
    for a in range(100):
        for b in range(100):
            text = scratch_plus(a, b)
            assert equations_hold(text), text
            assert text.endswith(f"{a} + {b} = {a + b}.")


def test_every_step_of_every_difference_is_right() -> None:
    for a in range(100):
        for b in range(a + 1):
            text = scratch_minus(a, b)
            assert equations_hold(text), text
            assert text.endswith(f"{a} - {b} = {a - b}.")


def test_the_forms() -> None:
    assert scratch_plus(27, 45) == "7 + 5 = 12, carry 1. 2 + 4 + 1 = 7. So 27 + 45 = 72."
    assert scratch_plus(3, 4) == "3 + 4 = 7."
    assert scratch_minus(52, 17) == "12 - 7 = 5, borrow 1. 5 - 1 - 1 = 3. So 52 - 17 = 35."
