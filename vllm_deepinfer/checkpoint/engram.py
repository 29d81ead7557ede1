"""Engram's hash: which table rows the n-gram that ends at each position reads."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, normalizers

from .checks import engram_primes
from .errors import ConfigError
from .text_config import TextConfig

Ints = NDArray[np.int64]

_SINGLE_SPACE = "\ue000"  # private use: carries a token that is one space through Strip()
_SEED_STEP = 10007  # the layer with id l draws its multipliers from default_rng(10007 * l)


def compressed_token_map(tokenizer: Tokenizer) -> tuple[Ints, int]:
    """Map every token id to the id of its normalised text: " The", "the" and "THÉ" become one.

    Args:
        tokenizer: The checkpoint's own tokenizer; another one hashes to other rows.

    Returns:
        Compressed ids, int64 [tokenizer's size with added tokens], numbered by first appearance, and their
        count.
    """
    normalizer = _normalizer()
    ids: dict[str, int] = {}
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    compressed = np.empty(size, dtype=np.int64)
    for token in range(size):
        text = tokenizer.decode([token], skip_special_tokens=False)
        # A part of a UTF-8 character has no text to normalise and counts under its raw spelling.
        key = tokenizer.id_to_token(token) if "\ufffd" in text else normalizer.normalize_str(text) or text
        compressed[token] = ids.setdefault(key or "", len(ids))
    return compressed, len(ids)


def _normalizer() -> normalizers.Sequence:
    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _SINGLE_SPACE),
            normalizers.Strip(),
            normalizers.Replace(_SINGLE_SPACE, " "),
        ]
    )


@dataclass(frozen=True, eq=False)
class EngramHash:
    """Everything that turns token ids into table rows. Columns are n-gram sizes 2, 3, ..., each ``heads``
    wide.

    Attributes:
        token_map: Compressed id per token id, int64 [vocab_size].
        pad_id: Compressed id that stands in for what lies before the start and for dead tokens.
        primes: Buckets per column, int64 [engram layers, (max_ngram - 1) * heads].
        offsets: First row of each column's buckets, int64, shaped as ``primes``.
        multipliers: Odd factors per lookback distance, int64 [engram layers, max_ngram].
    """

    token_map: Ints
    pad_id: int
    primes: Ints
    offsets: Ints
    multipliers: Ints

    @classmethod
    def build(cls, config: TextConfig, tokenizer: Tokenizer) -> EngramHash:
        """Build the hash of a config whose ``engram_layer_ids`` is not empty.

        Ids from the tokenizer's size up to ``vocab_size`` are padding of the embedding that no text yields;
        they hash as the pad token.

        Raises:
            ConfigError: The tokenizer's compressed vocabulary is not the one that the tables were trained
                with, or the tokenizer has ids beyond the embedding.
        """
        if not config.engram_layer_ids:
            raise ConfigError(
                "text_config.engram_layer_ids is empty: list the layers that have Engram tables"
            )
        known, size = compressed_token_map(tokenizer)
        if len(known) > config.vocab_size:
            raise ConfigError(
                f"text_config.vocab_size is {config.vocab_size}, but the tokenizer has {len(known)} ids: "
                "use the checkpoint's own tokenizer files"
            )
        if size != config.engram_compressed_vocab_size:
            raise ConfigError(
                f"text_config.engram_compressed_vocab_size is {config.engram_compressed_vocab_size}, but "
                f"the tokenizer's ids compress to {size}: use the checkpoint's own tokenizer files, because "
                "the hash depends on this number"
            )
        if config.engram_pad_token_id >= len(known):
            raise ConfigError(
                f"text_config.engram_pad_token_id is {config.engram_pad_token_id}, but the tokenizer has "
                f"only {len(known)} ids: use the checkpoint's own tokenizer files"
            )
        pad_id = int(known[config.engram_pad_token_id])
        token_map = np.full(config.vocab_size, pad_id, dtype=np.int64)
        token_map[: len(known)] = known
        primes = np.array(engram_primes(config), dtype=np.int64)
        offsets = np.cumsum(primes, axis=1) - primes
        return cls(token_map, pad_id, primes, offsets, _multipliers(config, size))

    @property
    def max_ngram(self) -> int:
        """The longest n-gram; ``max_ngram - 1`` preceding token ids are the whole state of the hash."""
        return int(self.multipliers.shape[1])

    @cached_property
    def heads(self) -> int:
        """Hash heads per n-gram size."""
        return int(self.primes.shape[1]) // (self.max_ngram - 1)

    def rows(self, ids: Ints, *, dead: NDArray[np.bool_] | None = None) -> Ints:
        """Table rows of one whole sequence: the readable reference for every faster form.

        Args:
            ids: Token ids, integers [N], the sequence from its first token.
            dead: Positions of image tokens, bool [N]; n-grams do not look at or past them.

        Returns:
            Rows of each Engram layer's table, int64 [N, engram layers, (max_ngram - 1) * heads].
        """
        length = len(ids)
        compressed = self.token_map[np.asarray(ids, dtype=np.int64)]
        blocked = np.zeros(length, dtype=bool)
        rolling = np.zeros((length, len(self.primes)), dtype=np.int64)
        columns = []
        for distance in range(self.max_ngram):
            back = np.arange(length) - distance
            blocked = blocked | (back < 0)
            if dead is not None:
                blocked = blocked | dead[np.maximum(back, 0)]
            token = np.where(blocked, self.pad_id, compressed[np.maximum(back, 0)])
            rolling = rolling ^ (token[:, None] * self.multipliers[:, distance])
            if distance:
                columns.append(rolling[:, :, None] % self._size_columns(distance))
        rows: Ints = np.concatenate(columns, axis=-1) + self.offsets
        return rows

    def _size_columns(self, distance: int) -> Ints:
        columns: Ints = self.primes[:, (distance - 1) * self.heads : distance * self.heads]
        return columns


def _multipliers(config: TextConfig, compressed_size: int) -> Ints:
    """Odd multipliers, int64 [layers, max_ngram], so small that a compressed id times one stays in int64."""
    bound = max(1, int(np.iinfo(np.int64).max) // compressed_size // 2)
    draws = [
        np.random.default_rng(_SEED_STEP * layer).integers(
            0, bound, size=config.engram_max_ngram_size, dtype=np.int64
        )
        for layer in config.engram_layer_ids
    ]
    return np.stack(draws) * 2 + 1
