"""A tiny dense model with a byte tokenizer, for tests that need any real engine."""

from __future__ import annotations

from pathlib import Path

VOCAB_SIZE = 512
MAX_MODEL_LEN = 512
FIRST_BYTE = 20  # ids 20 … 275 are the 256 bytes; 0 and 1 begin and end a sequence, the rest is unused


def write_tiny_qwen3(folder: Path) -> Path:
    """Write config, float32 weights and tokenizer, about 1 MB.

    The weights are random and large, so that the answer depends on the whole prompt; vLLM's dummy weights
    ignore it.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_MODEL_LEN,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
        dtype="float32",
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    _write_tokenizer(folder)
    return folder


def text_of(token_ids: list[int]) -> str:
    """The text of an answer; ids that are no bytes are left out."""
    return bytes(i - FIRST_BYTE for i in token_ids if 0 <= i - FIRST_BYTE < 256).decode()


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    names = ["<bos>", "<eos>", *(f"<unused{i}>" for i in range(2, VOCAB_SIZE))]
    for byte, char in bytes_to_unicode().items():
        names[FIRST_BYTE + byte] = char
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>").save_pretrained(
        folder
    )
