"""Find the value of a key among many, with sentences in between, at any length.

A key stands right before its value, without a colon, and the answer begins with the key: then the token
before says which one is next, the form that attention finds first.
"""

from __future__ import annotations

from ..draw import Draw, Templates, commands
from ..lesson import Lesson, Message, assistant, user
from ..words import KEYS, NOUNS, WORDS
from .chat import effort

HEADS = Templates(
    ("Notes:\n{}\n", "Here is a list:\n{}\n", "Read these notes.\n{}\n", "{}\n"),
    ("These are my notes:\n{}\n", "A list:\n{}\n"),
)
ASKED = commands(
    (
        "find {}",
        "look up {}",
        "give me {}",
        "give me the value of {}",
        "tell me {}",
        "tell me the value of {}",
        "find the value of {}",
        "say what {} is",
        "look for {}",
        "search for {}",
    ),
    (
        "What is the value of {}?",
        "What is {}?",
        "what is {}",
        "what's {}?",
        "Which value has {}?",
        "Which value does {} have?",
        "What does {} have?",
        "{}?",
        "And {}?",
        "What about {}?",
        "Where is {}?",
        "What stands behind {}?",
        "The value of {}?",
    ),
    ("Please find {}.", "Tell me the value of {}.", "What value has {}?"),
)
FILLERS = (
    "The {0} {1} is {2}.",
    "I saw a {0} {1}.",
    "It was a {0} and {2} day.",
    "We like the {0} {1}.",
    "There is a {2} {1} in the {0} house.",
)
TOKENS_OF_FILLER = 8
TOKENS_OF_PAIR = 3


def value_of(draw: Draw, key: str) -> str:
    """A word, one token; the pair of key and value is of this side."""
    return draw.made("pair", lambda: f"{key} {draw.of(WORDS)}").split(" ")[1]


def notes(draw: Draw, keys: list[str], tokens: int) -> tuple[str, dict[str, str]]:
    """Lines with every key once, and enough sentences between them for about ``tokens`` tokens."""
    known = {key: value_of(draw, key) for key in keys}
    lines = [f"{key} {value}" for key, value in known.items()]
    for _ in range(max(0, tokens - TOKENS_OF_PAIR * len(lines)) // TOKENS_OF_FILLER):
        lines.append(draw.of(FILLERS).format(draw.of(WORDS), draw.of(NOUNS), draw.of(WORDS)))
    draw.rng.shuffle(lines)
    return "\n".join(lines), known


def retrieval_at(draw: Draw, tokens: int, questions: int, *, thinks: bool = False) -> Lesson:
    """Notes of about ``tokens`` tokens, and so many questions about them, one turn each."""
    count = min(len(KEYS), max(3, min(tokens // 8, draw.rng.randint(8, len(KEYS)))))
    keys = draw.rng.sample(KEYS, count)
    text, known = notes(draw, keys, tokens)
    messages: list[Message] = []
    for number, key in enumerate(draw.rng.sample(keys, min(questions, count))):
        asked = draw.template(ASKED).format(key)
        asked = asked if number else draw.template(HEADS).format(text) + asked
        reasoning = f"I look for {key}." if thinks else None
        messages += [user(asked), assistant(f"{key} {known[key]}", reasoning)]
    return Lesson(
        "retrieval",
        tuple(messages),
        thinking=thinks,
        effort=effort(draw),
        templates=frozenset(draw.templates),
        values=frozenset(draw.values),
    )


def retrieval(draw: Draw) -> Lesson:
    """Notes of 30 to 1,000 tokens, short ones more often; more questions about longer ones.

    With reasoning there is one question.
    """
    tokens = int(30 * (1000 / 30) ** draw.rng.random())
    thinks = draw.chance(0.15)
    return retrieval_at(draw, tokens, 1 if thinks else draw.rng.randint(3, 7) + tokens // 60, thinks=thinks)
