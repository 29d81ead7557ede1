"""The bytes of one object: a versioned header that can be checked, then the KV of a run, section by section.

    8s magic   H version   H flags   I header bytes   Q payload bytes   Q raw bytes
    16s XXH3-128 of the payload as stored   16s XXH3-128 of the header with this field zero
    JSON {"key", "sections": [[name, bytes], …]}, zeros up to a multiple of 512, payload

Every read checks everything: magic, version, header, key (a swapped object), sections (another layout),
length (a truncated one) and the payload's checksum. XXH3 runs at the speed of memory (17 GB/s on the machine
that chose it, where CRC32 makes 2.4 and SHA-256 1.6); it finds accidents, not forgers, who need write access.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import xxhash

from vllm_deepinfer.store.base import Buffer
from vllm_deepinfer.store.errors import CorruptObject
from vllm_deepinfer.store.keys import Key

VERSION = 1
ALIGNMENT = 512
PIECE = 128 << 10  # copied, then checked: fits into the second-level cache of any server core
FAULTS = ("magic", "version", "header", "key", "layout", "truncated", "checksum", "compression")
_MAGIC = b"VDIKVRUN"
_HEAD = struct.Struct("<8sHHIQQ16s16s")
_ZSTD = 1
_MAX_HEADER = 1 << 20


class Section(NamedTuple):
    """One KV-cache group's share of a run.

    Attributes:
        name: What it is, such as "full 0".
        nbytes: Its size; the same for every run of a layout.
    """

    name: str
    nbytes: int


Sections = tuple[Section, ...]


def encode(
    key: Key, sections: Sections, values: Sequence[Buffer], zstd_level: int | None = None
) -> list[Buffer]:
    """The parts of an object, in order; the values are not copied unless they are compressed.

    Args:
        key: Its name, kept in the header.
        sections: What the values are.
        values: One contiguous buffer per section, of that section's size.
        zstd_level: 1 to 22, or None to store the bytes as they are. Quantised KV hardly shrinks.

    Raises:
        ValueError: sizes that differ from the sections'.
    """
    views = [memoryview(value).cast("B") for value in values]
    if [view.nbytes for view in views] != [section.nbytes for section in sections]:
        raise ValueError(f"values of {[v.nbytes for v in views]} bytes do not fit the sections {sections}")
    raw, flags = sum(view.nbytes for view in views), 0
    payload: list[Buffer] = list(views)
    if zstd_level is not None:
        payload, flags = [_compress(views, zstd_level)], _ZSTD
    checksum = xxhash.xxh3_128()
    for part in payload:
        checksum.update(part)
    return [_header(key, sections, flags, payload, raw, checksum.digest()), *payload]


class Opened:
    """An object whose header is right and whose payload is checked while somebody copies it.

    A pass over a MiB for the checksum alone costs half as much as the copy; over bytes that have just been
    copied, and are in the core's cache, a quarter of that. So the payload is unchecked until `finish`: what
    was copied before may be wrong, and must not be used when `finish` raises.

    Attributes:
        values: One buffer per section, views of the object unless it was compressed.
    """

    def __init__(self, key: Key, values: list[memoryview], checksum: bytes | None) -> None:
        self._key, self.values, self._checksum = key, values, checksum
        self._left = sum(value.nbytes for value in values) if checksum is not None else 0
        self._hash = xxhash.xxh3_128()

    def check(self, piece: memoryview) -> None:
        """The next bytes of `values`, in order: a view of them, or the copy."""
        if self._checksum is not None:
            self._hash.update(piece)
            self._left -= piece.nbytes

    def copy_to(self, targets: Sequence[memoryview]) -> None:
        """Copy the sections into buffers of bytes, each of its section's size; check what arrives."""
        for value, target in zip(self.values, targets, strict=True):
            for start in range(0, value.nbytes, PIECE):
                piece = target[start : start + PIECE]
                piece[:] = value[start : start + PIECE]
                self.check(piece)

    def finish(self) -> None:
        """Raises CorruptObject if the payload has changed since it was written.

        Raises:
            AssertionError: not all of it went through `check`.
        """
        assert self._left == 0, f"{self._left} bytes of a payload were not checked"
        if self._checksum is not None and self._hash.digest() != self._checksum:
            raise CorruptObject(
                "checksum", f"the payload of object {self._key.name[:16]} has changed since it was written"
            )


def open_object(data: memoryview, key: Key, sections: Sections) -> Opened:
    """Check everything but the payload's checksum; that of a compressed payload too.

    Args:
        data: The object, padding behind it allowed.
        key: What was asked for.
        sections: What this engine's layout expects.

    Raises:
        CorruptObject: anything is not as it was written; `why` says what.
    """
    header = _read_header(data)
    expected = _meta_text(key, sections)
    if data[_HEAD.size : _HEAD.size + len(expected)] != expected:
        _explain(_meta(data, header), key, sections)
    payload = data[header.size : header.size + header.payload]
    if payload.nbytes < header.payload:
        raise CorruptObject(
            "truncated", f"object {key.name[:16]} ends {header.payload - payload.nbytes} bytes early"
        )
    if header.raw != sum(section.nbytes for section in sections):  # before anything of that size is allocated
        raise CorruptObject("layout", f"object {key.name[:16]} holds {header.raw} bytes")
    if header.flags & _ZSTD:
        whole = Opened(key, [payload], header.checksum)
        whole.check(payload)
        whole.finish()
        return Opened(key, _split(_decompress(payload, header.raw), key, header.raw, sections), None)
    return Opened(key, _split(payload, key, header.raw, sections), header.checksum)


def _explain(meta: dict[str, object], key: Key, sections: Sections) -> None:
    """Raises CorruptObject unless the header says the same in other words."""
    if meta.get("key") != key.name:
        raise CorruptObject("key", f"object {key.name[:16]} holds the bytes of {str(meta.get('key'))[:16]}")
    if meta.get("sections") != [list(section) for section in sections]:
        raise CorruptObject(
            "layout", f"object {key.name[:16]} has sections {meta.get('sections')}, not {sections}"
        )


def _split(payload: memoryview, key: Key, raw: int, sections: Sections) -> list[memoryview]:
    if payload.nbytes != raw:
        raise CorruptObject("truncated", f"object {key.name[:16]} holds {payload.nbytes} bytes, not {raw}")
    values, offset = [], 0
    for section in sections:
        values.append(payload[offset : offset + section.nbytes])
        offset += section.nbytes
    return values


def decode(data: memoryview, key: Key, sections: Sections) -> list[memoryview]:
    """One buffer per section, checked; views of `data` unless it was compressed. As `open_object`.

    Raises:
        CorruptObject: anything is not as it was written; `why` says what.
    """
    opened = open_object(data, key, sections)
    for value in opened.values:
        opened.check(value)
    opened.finish()
    return opened.values


def verify(data: memoryview, key: Key) -> None:
    """`decode` where the layout is not known: the object must be whole and must be this key's.

    Raises:
        CorruptObject: it is not.
    """
    sections = _meta(data, _read_header(data)).get("sections")
    if not isinstance(sections, list) or not all(isinstance(s, list) and len(s) == 2 for s in sections):
        raise CorruptObject("header", f"object {key.name[:16]} names no sections")
    decode(data, key, tuple(Section(str(name), int(nbytes)) for name, nbytes in sections))


def _meta_text(key: Key, sections: Sections) -> bytes:
    """The header's JSON, as every writer writes it: reading compares it and parses only what differs."""
    return b'{"key":"%b","sections":%b}' % (key.name.encode(), _sections_text(sections))


@lru_cache(maxsize=64)
def _sections_text(sections: Sections) -> bytes:
    return json.dumps(sections, separators=(",", ":")).encode()


class _Header(NamedTuple):
    flags: int
    size: int
    payload: int
    raw: int
    checksum: bytes


def _header(
    key: Key, sections: Sections, flags: int, payload: Sequence[Buffer], raw: int, checksum: bytes
) -> bytes:
    meta = _meta_text(key, sections)
    size = -(-(_HEAD.size + len(meta)) // ALIGNMENT) * ALIGNMENT
    nbytes = sum(memoryview(part).nbytes for part in payload)
    head = (_MAGIC, VERSION, flags, size, nbytes, raw, checksum)
    body = meta.ljust(size - _HEAD.size, b"\0")
    own = xxhash.xxh3_128_digest(_HEAD.pack(*head, bytes(16)) + body)
    return _HEAD.pack(*head, own) + body


def _read_header(data: memoryview) -> _Header:
    if data.nbytes < _HEAD.size:
        raise CorruptObject("truncated", f"an object of {data.nbytes} bytes has no header")
    magic, version, flags, size, payload, raw, checksum, own = _HEAD.unpack_from(data)
    if magic != _MAGIC:
        raise CorruptObject("magic", "an object does not begin as one")
    if version != VERSION:
        raise CorruptObject("version", f"an object of layout version {version}, this is version {VERSION}")
    if not _HEAD.size <= size <= _MAX_HEADER or data.nbytes < size:
        raise CorruptObject("truncated", f"an object's header of {size} bytes is not all there")
    fields = (magic, version, flags, size, payload, raw, checksum)
    if xxhash.xxh3_128_digest(_HEAD.pack(*fields, bytes(16)) + bytes(data[_HEAD.size : size])) != own:
        raise CorruptObject("header", "an object's header has changed since it was written")
    return _Header(flags, size, payload, raw, checksum)


def _meta(data: memoryview, header: _Header) -> dict[str, object]:
    try:
        meta = json.loads(bytes(data[_HEAD.size : header.size]).rstrip(b"\0"))
    except ValueError:
        meta = None
    if not isinstance(meta, dict):
        raise CorruptObject("header", "an object's header is not JSON")
    return meta


def _compress(views: Sequence[memoryview], level: int) -> bytes:
    import zstandard

    compressor = zstandard.ZstdCompressor(level=level).compressobj()
    return b"".join([*(compressor.compress(view) for view in views), compressor.flush()])


def _decompress(payload: memoryview, raw: int) -> memoryview:
    try:
        import zstandard

        return memoryview(zstandard.ZstdDecompressor().decompress(payload, max_output_size=raw))
    except ImportError:
        raise CorruptObject(
            "compression", "an object is compressed and the package zstandard is not installed"
        ) from None
    except zstandard.ZstdError as error:
        raise CorruptObject("compression", f"an object's payload does not decompress: {error}") from None
