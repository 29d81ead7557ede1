"""Keys: a chained 256-bit digest of token ids per run of tokens.

    root     = H(fingerprint, cache salt, shard)
    digest_0 = H(root,     tokens of run 0, images that touch run 0)
    digest_i = H(digest_{i-1}, tokens of run i, images that touch run i)

The fingerprint covers weights, config, tokenizer, KV dtype and layout. Equal digests therefore mean equal KV,
in every process and under every hash seed, and a tenant's salt makes a different tree. H is SHA-256: a
truncated or builtin hash has served one user's KV to another (vLLM issue 12621).
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

DIGEST_BYTES = 32
_PARENT_BYTES = 8
_NAME = re.compile(r"([0-9a-f]{64})\.([0-9a-f]{16})\.([0-9a-f]+)\.([0-9a-f]+)")
_MAX_TOKEN = 2**32 - 1


@dataclass(frozen=True, slots=True)
class Key:
    """The name of one object: a run of tokens behind everything before it.

    Attributes:
        digest: 32 bytes; the only part that tells what is stored.
        parent: first 8 bytes of the digest before this one, for the order of evictions.
        start: tokens before the run.
        tokens: tokens in the run, at least 1.
    """

    digest: bytes
    parent: bytes
    start: int
    tokens: int

    @property
    def name(self) -> str:
        """Text form, safe as a file name and as part of an object store's key."""
        return f"{self.digest.hex()}.{self.parent.hex()}.{self.start:x}.{self.tokens:x}"

    @property
    def id(self) -> bytes:
        """What a child carries as its `parent`."""
        return self.digest[:_PARENT_BYTES]

    @classmethod
    def parse(cls, name: str) -> Self | None:
        """The key of that name, or None for anything else that may lie in a store."""
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        digest, parent, start, tokens = match.groups()
        key = cls(bytes.fromhex(digest), bytes.fromhex(parent), int(start, 16), int(tokens, 16))
        return key if key.tokens and key.name == name else None


@dataclass(frozen=True, slots=True)
class Image:
    """An image (or another input that is no token) inside a prompt.

    Attributes:
        identifier: hash of its content.
        offset: first placeholder token.
        length: placeholder tokens.
    """

    identifier: str
    offset: int
    length: int


def fingerprint(parts: Mapping[str, Any]) -> bytes:
    """Digest of everything that decides what KV a token gets: weights, config, tokenizer, dtype, layout.

    Raises:
        TypeError: a part is not JSON: its text would depend on the process.
    """
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(b"vllm-deepinfer fingerprint 1\0" + text.encode()).digest()


def root(fingerprint: bytes, salt: str = "", shard: str = "") -> bytes:
    """The digest before the first run: 32 bytes that differ per model, tenant and shard of the KV."""
    salt_bytes, shard_bytes = salt.encode(), shard.encode()
    head = struct.pack("<II", len(salt_bytes), len(shard_bytes))
    return hashlib.sha256(b"vllm-deepinfer root 1\0" + fingerprint + head + salt_bytes + shard_bytes).digest()


def chain(
    root: bytes,
    tokens: Sequence[int],
    run_tokens: int,
    images: Iterable[Image] = (),
    after: Key | None = None,
) -> list[Key]:
    """Keys of the whole runs of a prompt, in order; a run that is not full has none.

    Args:
        root: From `root`.
        tokens: Token ids from position 0 on, each in [0, 2^32).
        run_tokens: Tokens per run, at least 1.
        images: Those of the prompt; one counts for every run that its placeholders touch.
        after: The last key that is known already; keys behind it are computed.

    Raises:
        ValueError: a run length below 1, a token id out of range, or `after` off the grid of runs.
    """
    if run_tokens < 1:
        raise ValueError(f"a run has at least one token, not {run_tokens}")
    first = 0 if after is None else after.start + after.tokens
    if first % run_tokens:
        raise ValueError(f"a chain of {run_tokens}-token runs cannot go on at token {first}")
    pictures = sorted(images, key=lambda image: (image.offset, image.identifier))
    digest, keys = (root if after is None else after.digest), []
    for start in range(first, len(tokens) - run_tokens + 1, run_tokens):
        parent, digest = digest, _digest(digest, tokens[start : start + run_tokens], start, pictures)
        keys.append(Key(digest, parent[:_PARENT_BYTES], start, run_tokens))
    return keys


def _digest(before: bytes, tokens: Sequence[int], start: int, images: Sequence[Image]) -> bytes:
    hasher = hashlib.sha256(before)
    try:
        hasher.update(array("I", tokens).tobytes())
    except (OverflowError, TypeError):
        wrong = next(t for t in tokens if not isinstance(t, int) or not 0 <= t <= _MAX_TOKEN)
        raise ValueError(f"token id {wrong!r} is not in [0, 2^32)") from None
    for image in images:
        if image.offset < start + len(tokens) and image.offset + image.length > start:
            name = image.identifier.encode()
            hasher.update(struct.pack("<Iqq", len(name), image.offset - start, image.length) + name)
    return hasher.digest()
