"""Which side of the split a value or a module is on: a hash of its text decides, on every machine alike."""

from __future__ import annotations

import hashlib
from typing import Literal

Split = Literal["train", "heldout"]


def side_of(text: str, percent: int = 10) -> Split:
    """``percent`` of all texts are held out."""
    digest = hashlib.sha256(text.encode()).digest()
    return "heldout" if int.from_bytes(digest[:4], "big") % 100 < percent else "train"
