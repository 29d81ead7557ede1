"""Errors of the tokeniser, each one sentence for the person who can fix it."""


class TokenizerError(ValueError):
    """The tokenizer.json, or the text given to it, cannot be used. A client's text maps to HTTP 400."""


class TokenizerBusyError(RuntimeError):
    """More text is waiting to be tokenised than the pool takes on. Maps to HTTP 429."""
