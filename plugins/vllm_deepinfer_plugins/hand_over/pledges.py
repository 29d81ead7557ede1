"""The pledge board: what a prefill engine still holds, where a peer can read it without asking anybody.

A decode engine that reads KV after its peer has released it reads somebody else's. vLLM's leases make that
unlikely, not impossible: a decode engine that stood still for longer than the lease, or a hold that was
released by hand under a read, goes unnoticed. So each hold has a number, which stands on the board of the
engine from before the hold is announced until it is revoked, and the board is registered memory like the KV
itself. A peer reads the word *after* the KV: if it is still the number, all that it read was held.
"""

from __future__ import annotations

import numpy as np

SLOTS = 4096
"""Holds that stand at the same time before the oldest is taken for revoked, which costs a recompute."""
REVOKED = 0


class PledgeBoard:
    """The words of one worker, and whose they are.

    Attributes:
        words: [SLOTS] uint64, the registered memory; a hold's number stands at number % SLOTS.
    """

    def __init__(self) -> None:
        self.words = np.zeros(SLOTS, dtype=np.uint64)
        self._numbers: dict[str, int] = {}

    @property
    def address(self) -> int:
        """Where the words lie in this process."""
        return int(self.words.ctypes.data)

    def give(self, request_id: str, number: int) -> None:
        """From now on the KV of this request stands still."""
        self._numbers[request_id] = number
        self.words[number % SLOTS] = number

    def revoke(self, request_id: str) -> None:
        """It may change from now on; before its blocks are free. Idempotent."""
        number = self._numbers.pop(request_id, None)
        if number is not None and self.words[number % SLOTS] == number:
            self.words[number % SLOTS] = REVOKED

    def fulfil(self, request_id: str) -> None:
        """It has been read to the end. The word stays: its reader has yet to look at it."""
        self._numbers.pop(request_id, None)

    def __len__(self) -> int:
        return len(self._numbers)


def word_at(board: int, number: int) -> int:
    """Address of a hold's word on a board that begins at address `board`."""
    return board + number % SLOTS * np.dtype(np.uint64).itemsize
