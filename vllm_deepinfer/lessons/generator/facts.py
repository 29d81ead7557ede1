"""What the little world knows."""

from __future__ import annotations

from dataclasses import dataclass

from ..draw import Templates
from ..words import DAYS, words


@dataclass(frozen=True)
class Topic:
    """One kind of fact: pairs of a thing and what is known of it, and how one asks and answers."""

    subject: str
    facts: tuple[tuple[str, str], ...]
    wordings: Templates
    answer: str


def _pairs(text: str) -> tuple[tuple[str, str], ...]:
    found = (part.split("=") for part in text.split(","))
    return tuple((thing.strip(), known.strip()) for thing, known in found)


MONTHS = words("January February March April May June July August September October November December")

TOPICS = (
    Topic(
        "the capital of {}",
        _pairs(
            "France=Paris,Japan=Tokyo,Italy=Rome,Spain=Madrid,Germany=Berlin,England=London,Egypt=Cairo,"
            "Greece=Athens,Norway=Oslo,Austria=Vienna,Portugal=Lisbon,China=Beijing,Cuba=Havana,Peru=Lima,"
            "Poland=Warsaw,Russia=Moscow,India=New Delhi,Ireland=Dublin,Canada=Ottawa,Kenya=Nairobi"
        ),
        Templates(
            (
                "What is the capital of {}?",
                "what is the capital of {}",
                "Capital of {}?",
                "Name the capital of {}.",
                "Which city is the capital of {}?",
                "Tell me the capital of {}.",
                "What's the capital of {}?",
            ),
            ("Which city is the capital of {}, please?", "Please name the capital of {}."),
        ),
        "the capital of {} is {}.",
    ),
    Topic(
        "the color of {}",
        _pairs(
            "grass=green,snow=white,the sky=blue,blood=red,coal=black,a lemon=yellow,a carrot=orange,"
            "milk=white,a tomato=red,the sun=yellow,a leaf=green,the sea=blue,chocolate=brown"
        ),
        Templates(
            (
                "What color is {}?",
                "what color is {}",
                "Which color is {}?",
                "What is the color of {}?",
                "Tell me the color of {}.",
            ),
            ("What color has {}?", "Please tell me the color of {}."),
        ),
        "{} is {}.",
    ),
    Topic(
        "the opposite of {}",
        _pairs(
            "hot=cold,cold=hot,big=small,small=big,old=young,young=old,long=short,short=long,fast=slow,"
            "slow=fast,high=low,low=high,hard=soft,soft=hard,light=dark,dark=light,open=closed,good=bad,"
            "bad=good,new=old,up=down,down=up,left=right,right=left,full=empty,empty=full"
        ),
        Templates(
            (
                "What is the opposite of {}?",
                "what is the opposite of {}",
                "Opposite of {}?",
                "Which word is the opposite of {}?",
                "Give me the opposite of {}.",
            ),
            ("Please give me the opposite of {}.", "What's the opposite of {}?"),
        ),
        "the opposite of {} is {}.",
    ),
    Topic(
        "the day after {}",
        tuple(zip(DAYS, DAYS[1:] + DAYS[:1], strict=True)),
        Templates(
            (
                "Which day comes after {}?",
                "What day comes after {}?",
                "What is the day after {}?",
                "Tell me the day after {}.",
            ),
            ("Which day is after {}?",),
        ),
        "the day after {} is {}.",
    ),
    Topic(
        "the month after {}",
        tuple(zip(MONTHS, MONTHS[1:] + MONTHS[:1], strict=True)),
        Templates(
            (
                "Which month comes after {}?",
                "What month comes after {}?",
                "What is the month after {}?",
                "Tell me the month after {}.",
            ),
            ("Which month is after {}?",),
        ),
        "the month after {} is {}.",
    ),
    Topic(
        "the number of {}",
        _pairs(
            "days in a week=7,hours in a day=24,minutes in an hour=60,months in a year=12,"
            "seconds in a minute=60,legs of a dog=4,legs of a spider=8,fingers on a hand=5,letters in the "
            "alphabet=26,bits in a byte=8"
        ),
        Templates(
            ("How many {}?", "how many {}?", "What is the number of {}?", "Tell me the number of {}."),
            ("How many {}, please?",),
        ),
        "the number of {} is {}.",
    ),
    Topic(
        "the sound of {}",
        _pairs("a dog=woof,a cat=meow,a cow=moo,a sheep=baa,a duck=quack,a lion=roar,a bee=buzz"),
        Templates(
            ("What does {} say?", "what does {} say", "What sound does {} make?"),
            ("Which sound does {} make?",),
        ),
        "{} says {}.",
    ),
)
