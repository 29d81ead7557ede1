"""The two errors that reading a checkpoint raises, each with one sentence for the user."""


class ConfigError(ValueError):
    """A config.json field, or a tokenizer beside it, that no DeepSeek-V4.1 model can be built from."""


class CheckpointError(ValueError):
    """A weight file or tensor that is missing, extra, misshapen or damaged."""
