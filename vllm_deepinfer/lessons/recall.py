"""Lists of keys with their values, said again in other orders: what finding a value is learnt from.

A retrieval asks for a few tokens of a thousand. Here every line of the second and third list says what one of
the first had, so that most of the text asks for something, at distances of a few tokens to a few hundred.
Half of the lists are of any tokens of the vocabulary: what is to be learnt is to say again whatever
stood there.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import count

from .draw import Draw
from .encoder import Encoder
from .generator.retrieval import value_of
from .split import Split
from .words import KEYS

Pair = tuple[list[int], list[int]]
"""Tokens of a key, and of its value."""
FEWEST, LISTS = 3, 3
"""Pairs of the shortest list; lists of a document."""
MOST_PAIRS, LONGEST_VALUE = 40, 4
"""Of lists of any tokens: pairs, and tokens of a value."""


def recalls(seed: int, split: Split, encoder: Encoder) -> Iterator[tuple[list[int], list[bool]]]:
    """Endless documents: ids, and which of them are values, with the end of the line, behind the first list.

    Args:
        split: Pairs of known words are of this side, as in a retrieval.
    """
    line = encoder.text("\n")
    for number in count():
        draw = Draw(random.Random(f"{seed} {split} recall {number}"), split)
        pairs = (_known if draw.chance(0.5) else _unknown)(draw, encoder)
        ids, mask = [encoder.bos], [False]
        for place in range(LISTS):
            draw.rng.shuffle(pairs)
            for key, value in pairs:
                ids += [*key, *value, *line]
                mask += [False] * len(key) + [place > 0] * (len(value) + len(line))
        yield [*ids, encoder.eos], [*mask, True]


def _known(draw: Draw, encoder: Encoder) -> list[Pair]:
    """Keys and values as a retrieval has them."""
    pairs = int(FEWEST * ((len(KEYS) + 1) / FEWEST) ** draw.rng.random())
    keys = draw.rng.sample(KEYS, pairs)
    return [(encoder.text(key), encoder.text(f" {value_of(draw, key)}")) for key in keys]


def _unknown(draw: Draw, encoder: Encoder) -> list[Pair]:
    """One token of the vocabulary for a key, one to four for its value."""
    pairs = int(FEWEST * ((MOST_PAIRS + 1) / FEWEST) ** draw.rng.random())
    keys = draw.rng.sample(encoder.words, pairs)
    return [([key], draw.rng.choices(encoder.words, k=draw.rng.randint(1, LONGEST_VALUE))) for key in keys]
