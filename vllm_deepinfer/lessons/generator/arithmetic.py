"""Addition and subtraction up to two digits, digit by digit on a scratch pad.

The sums of two digits are all learnt; pairs of numbers are held out.
"""

from __future__ import annotations

from ..draw import Draw, Templates, commands
from ..lesson import Lesson
from .chat import Pair, conversation

PLUS = commands(
    (
        "add {0} and {1}",
        "calculate {0} + {1}",
        "compute {0} + {1}",
        "work out {0} + {1}",
        "give me {0} + {1}",
        "tell me {0} + {1}",
        "tell me what {0} + {1} is",
    ),
    (
        "What is {0} + {1}?",
        "what is {0} + {1}",
        "What's {0} + {1}?",
        "{0} + {1}",
        "{0} + {1} = ?",
        "{0} + {1} =",
        "{0} + {1}?",
        "How much is {0} + {1}?",
        "What is the sum of {0} and {1}?",
        "What do you get if you add {0} and {1}?",
        "What does {0} + {1} make?",
    ),
    ("Please calculate {0} + {1}.", "Tell me {0} + {1}.", "What do you get for {0} + {1}?"),
)
MINUS = commands(
    (
        "calculate {0} - {1}",
        "compute {0} - {1}",
        "work out {0} - {1}",
        "give me {0} - {1}",
        "tell me {0} - {1}",
        "tell me what {0} - {1} is",
        "subtract {1} from {0}",
    ),
    (
        "What is {0} - {1}?",
        "what is {0} - {1}",
        "What's {0} - {1}?",
        "{0} - {1}",
        "{0} - {1} = ?",
        "{0} - {1} =",
        "{0} - {1}?",
        "How much is {0} - {1}?",
        "What is {0} minus {1}?",
        "What do you get if you take {1} from {0}?",
    ),
    ("Please calculate {0} - {1}.", "Tell me {0} - {1}."),
)
STORIES = Templates(
    (
        "{2} has {0} {3}s and gets {1} more. How many {3}s does {2} have?",
        "There are {0} {3}s in a box. {2} adds {1} {3}s. How many {3}s are in the box?",
        "{2} finds {0} {3}s and then {1} more. How many {3}s is that?",
        "{2} had {0} {3}s. Now {2} buys {1} more {3}s. How many are there now?",
        "{2} has {0} {3}s and {1} other {3}s. How many {3}s does {2} have in all?",
    ),
    ("{2} has {0} {3}s and finds {1} more. How many {3}s does {2} have now?",),
)


def scratch_plus(a: int, b: int) -> str:
    """Ones, carry, tens: 27 + 45 gives "7 + 5 = 12, carry 1. 2 + 4 + 1 = 7. So 27 + 45 = 72."."""
    if a < 10 and b < 10:
        return f"{a} + {b} = {a + b}."
    ones = a % 10 + b % 10
    carry = ones // 10
    tens = f"{a // 10} + {b // 10} + {carry} = {a // 10 + b // 10 + carry}."
    return f"{a % 10} + {b % 10} = {ones}, carry {carry}. {tens} So {a} + {b} = {a + b}."


def scratch_minus(a: int, b: int) -> str:
    """Ones, borrow, tens, for a ≥ b."""
    if a < 10:
        return f"{a} - {b} = {a - b}."
    borrow = int(a % 10 < b % 10)
    ones = a % 10 + 10 * borrow
    first = f"{ones} - {b % 10} = {ones - b % 10}, borrow {borrow}."
    tens = f"{a // 10} - {b // 10} - {borrow} = {a // 10 - b // 10 - borrow}."
    return f"{first} {tens} So {a} - {b} = {a - b}."


def numbers(draw: Draw, kind: str) -> tuple[int, int]:
    """A pair of this side; for minus the first is not the smaller one."""
    most = draw.of((9, 99, 99, 99))

    def make() -> str:
        a, b = draw.rng.randint(0, most), draw.rng.randint(0, most)
        return f"{max(a, b)},{min(a, b)}" if kind == "minus" else f"{a},{b}"

    a, b = draw.made(kind, make).split(",")
    return int(a), int(b)


def sum_or_difference(draw: Draw) -> Pair:
    """Answer with the scratch pad and the result at its end."""
    if draw.chance(0.6):
        a, b = numbers(draw, "plus")
        return draw.template(PLUS).format(a, b), scratch_plus(a, b), f"{a} + {b} = {a + b}"
    a, b = numbers(draw, "minus")
    return draw.template(MINUS).format(a, b), scratch_minus(a, b), f"{a} - {b} = {a - b}"


def written_out(draw: Draw) -> Pair:
    """Without reasoning the scratch pad is part of the answer."""
    question, scratch, _ = sum_or_difference(draw)
    return question, "", scratch


def arithmetic(draw: Draw) -> Lesson:
    """One question with reasoning, or up to four with the scratch pad in the answer."""
    if draw.chance(0.35):
        return conversation(draw, "arithmetic", sum_or_difference, most=1, thinking=1.0)
    return conversation(draw, "arithmetic", written_out, most=4, thinking=0.0)
