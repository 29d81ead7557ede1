"""A request's drafts with their confidences, as one list: what travels from the runner to the scheduler.

vLLM sends lists of token ids and nothing beside them. A list with an attribute is one to everybody who does
not know of it, and keeps the attribute through the pickling between vLLM's processes.
"""

from __future__ import annotations

from collections.abc import Iterable


class Drafted(list[int]):
    """Token ids.

    Attributes:
        confidences: of each, not calibrated; empty where the drafter has none.
    """

    def __init__(self, tokens: Iterable[int] = (), confidences: Iterable[float] = ()) -> None:
        super().__init__(tokens)
        self.confidences = list(confidences)
