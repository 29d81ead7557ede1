"""The error that the command line shows as one sentence."""

from __future__ import annotations


class UserError(ValueError):
    """A mistake of the user's: the message is one sentence that says what, where, and what to write instead.

    The command line prints it without a stack trace and exits with status 2.
    """
