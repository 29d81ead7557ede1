"""Text to token ids and back, with control tokens that no request can forge."""

from vllm_deepinfer.gateway.tokens.detokenizer import StreamDetokenizer
from vllm_deepinfer.gateway.tokens.errors import TokenizerBusyError, TokenizerError
from vllm_deepinfer.gateway.tokens.tokenizer import PromptTokenizer

__all__ = ["PromptTokenizer", "StreamDetokenizer", "TokenizerBusyError", "TokenizerError"]
