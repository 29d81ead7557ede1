"""The two errors that reading a checkpoint raises, each with one sentence for the user."""

from vllm_deepinfer.errors import UserError


class ConfigError(UserError):
    """A config.json field, or a tokenizer beside it, that no DeepSeek-V4.1 model can be built from."""


class CheckpointError(UserError):
    """A weight file or tensor that is missing, extra, misshapen or damaged."""
