"""Greetings, questions about the model, and facts of a closed little world.

Facts are learnt by heart, so they are held out by wording alone.
"""

from __future__ import annotations

from collections.abc import Callable

from ..draw import Draw, Templates
from ..lesson import Lesson, Message, assistant, user
from . import facts

Pair = tuple[str, str, str]
"""Question, reasoning, answer."""

GREETINGS = Templates(
    (
        "Hi",
        "Hi!",
        "Hello",
        "Hello!",
        "Hey",
        "Good morning",
        "Good morning!",
        "Good evening!",
        "Hello there",
        "Hi, how are you?",
        "Hello! How are you?",
        "How are you?",
    ),
    ("Hello there!", "Good evening", "Hey!", "Hi! How are you?"),
)
WHO = Templates(
    (
        "Who are you?",
        "What are you?",
        "What is your name?",
        "Tell me who you are.",
        "Which model are you?",
        "Are you a human?",
        "Please introduce yourself.",
    ),
    ("Tell me what you are.", "Who are you, please?", "What model are you?"),
)
ABLE = Templates(
    ("What can you do?", "How can you help me?", "What can you help me with?", "What are you good at?"),
    ("What can you do for me?", "How can you help?"),
)
THANKS = Templates(
    ("Thanks!", "Thank you", "Thank you!", "Thanks a lot!", "Thanks", "Great, thank you!"),
    ("Thank you a lot!", "Great, thanks!"),
)
BYE = Templates(("Bye", "Bye!", "Goodbye", "See you later!"), ("Goodbye!", "See you!"))

HELLO = "Hello! How can I help you?"
NAME = "I am a tiny DeepSeek-V4.1 model, made to test vLLM-DeepInfer."
SKILLS = "I can add numbers, call tools, write JSON, copy text and find things in long notes."


def small_talk(draw: Draw) -> Pair:
    """A sentence that needs no knowledge."""
    wordings, reasoning, answer = draw.of(
        (
            (GREETINGS, "The user greets me.", HELLO),
            (WHO, "The user asks who I am.", NAME),
            (ABLE, "The user asks what I can do.", SKILLS),
            (THANKS, "The user thanks me.", "You are welcome!"),
            (BYE, "The user says goodbye.", "Goodbye!"),
        )
    )
    return draw.template(wordings), reasoning, answer


def fact(draw: Draw) -> Pair:
    """A question with one short answer that is known by heart."""
    topic = draw.of(facts.TOPICS)
    thing, known = draw.of(topic.facts)
    question = draw.template(topic.wordings).format(thing)
    answer = topic.answer.format(thing, known)
    return (
        question,
        f"The user asks for {topic.subject.format(thing)}. It is {known}.",
        (answer[0].upper() + answer[1:]),
    )


def one(draw: Draw) -> Pair:
    """Any question of this module."""
    return (small_talk if draw.chance(0.35) else fact)(draw)


def chat(draw: Draw) -> Lesson:
    """A conversation of one to five questions; with reasoning, of one."""
    return conversation(draw, "chat", one, most=5, thinking=0.5)


def conversation(
    draw: Draw, kind: str, question: Callable[[Draw], Pair], *, most: int, thinking: float
) -> Lesson:
    """Questions in a row that have nothing to do with each other."""
    thinks = draw.chance(thinking)
    messages: list[Message] = []
    for _ in range(1 if thinks else draw.rng.randint(1, most)):
        asked, reasoning, answer = question(draw)
        messages += [user(asked), assistant(answer, reasoning if thinks else None)]
    return Lesson(
        kind,  # type: ignore[arg-type]
        tuple(messages),
        thinking=thinks,
        effort=effort(draw),
        templates=frozenset(draw.templates),
        values=frozenset(draw.values),
    )


def effort(draw: Draw) -> str | None:
    """A reasoning effort: most clients leave the server's."""
    return draw.of((None, None, None, None, "low", "high", "max"))
