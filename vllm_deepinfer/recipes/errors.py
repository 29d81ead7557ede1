"""What is wrong with a recipe: all of it at once."""

from __future__ import annotations

from collections.abc import Iterable

from vllm_deepinfer.errors import UserError


class RecipeError(UserError):
    """A recipe that cannot be served.

    Attributes:
        faults: one sentence each: what is wrong, where, and what to write instead.
    """

    def __init__(self, faults: Iterable[str]) -> None:
        self.faults = tuple(faults)
        super().__init__("\n".join(self.faults))
