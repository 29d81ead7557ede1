"""Prometheus metrics of tokenisation, in the default registry."""

from prometheus_client import Counter

SERIAL_PROMPTS = Counter(
    "vllm_deepinfer_tokenize_serial_prompts",
    "Long prompts tokenised in one piece because no proved boundary rule covers the tokenizer.",
)
_CHARS = Counter(
    "vllm_deepinfer_tokenize_chars",
    "Characters of prompt text, by whether their ids came from the piece cache.",
    ["cached"],
)
CACHED_CHARS = _CHARS.labels("true")
ENCODED_CHARS = _CHARS.labels("false")
