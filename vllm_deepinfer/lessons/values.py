"""Names, places, titles and sentences that a user may say: known ones, and ones that nobody has seen.

What is asked of the model is to copy them, so many are made of syllables: what is learnt is copying, not a
list.
"""

from __future__ import annotations

from .draw import Draw
from .words import CITIES, COMMON, NAMES, PEOPLE, PLACES, SONGS, invented


def unknown(draw: Draw) -> str:
    """An invented word of this side, with a capital."""
    return draw.made("word", lambda: invented(draw.rng)).capitalize()


def person(draw: Draw) -> str:
    """First and last name, a first name, or invented ones."""
    kind = draw.rng.random()
    if kind < 0.45:
        return draw.value("name", NAMES)
    if kind < 0.65:
        return draw.value("person", PEOPLE)
    return unknown(draw) if kind < 0.85 else f"{unknown(draw)} {unknown(draw)}"


def place(draw: Draw) -> str:
    """A town of the little world, a city of this one, or an invented one."""
    kind = draw.rng.random()
    if kind < 0.45:
        return draw.value("city", PLACES)
    return draw.value("real city", CITIES) if kind < 0.7 else unknown(draw)


def title(draw: Draw) -> str:
    """Of a song: two words, three others, or invented ones, with or without capitals."""
    kind = draw.rng.random()
    if kind < 0.45:
        return draw.value("song", SONGS)
    if kind < 0.8:
        return sentence(draw, 3, 3).title() if draw.chance(0.5) else sentence(draw, 3, 3)
    return f"{unknown(draw)} {draw.of(COMMON)} {unknown(draw)}"


def sentence(draw: Draw, least: int, most: int) -> str:
    """So many common words, without a meaning."""
    count = draw.rng.randint(least, most)
    return draw.made("words", lambda: " ".join(draw.rng.choices(COMMON, k=count)))


def file_name(draw: Draw) -> str:
    """A path of one to three parts."""
    folders = [draw.of(COMMON) for _ in range(draw.rng.randint(0, 2))]
    return "/".join([*folders, f"{unknown(draw).lower()}.{draw.of(('py', 'txt', 'md', 'json', 'csv'))}"])
