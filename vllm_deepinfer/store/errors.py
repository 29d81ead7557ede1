"""What a backend raises. None of these reaches a request: the store turns each into a miss and counts it."""

from __future__ import annotations


class StoreError(Exception):
    """Base of what goes wrong while a backend works."""


class StoreFull(StoreError):
    """There is no room for the object, or the tier is read-only; nothing was published."""


class StoreUnavailable(StoreError):
    """The backend failed, hangs past its deadline, or is left alone for a while because it did."""


class CorruptObject(StoreError):
    """The bytes under a key are not the object that the key names.

    Args:
        why: one of `codec.FAULTS`, the label under which it is counted.
        message: one sentence for the log.
    """

    def __init__(self, why: str, message: str) -> None:
        super().__init__(message)
        self.why = why
