"""Why an engine did not accept a request. Once accepted, a request ends by a delta, not by an exception."""

from __future__ import annotations


class EngineError(Exception):
    """Base of every error that an engine raises. Its text is one sentence that may be shown to a user."""


class InvalidRequest(EngineError, ValueError):
    """The request can never be served: a value out of range, a prompt beyond the context. HTTP 400."""


class Overloaded(EngineError):
    """The engine's queue is full; the same request may succeed later. HTTP 429.

    Args:
        message: one sentence.
        retry_after_s: seconds after which to try again, a hint for `Retry-After`.
    """

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineUnavailable(EngineError):
    """The engine cannot take work: not started, draining, closed or dead. HTTP 503, or try another engine."""


class EngineDraining(EngineUnavailable):
    """The engine finishes what it has and takes nothing new."""


class EngineDead(EngineUnavailable):
    """The engine has failed and will not come back by itself."""
