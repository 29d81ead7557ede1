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
from typing import NamedTuple

import xxhash

from vllm_deepinfer.store.base import Buffer
from vllm_deepinfer.store.errors import CorruptObject
from vllm_deepinfer.store.keys import Key

VERSION = 1
ALIGNMENT = 512
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


def decode(data: memoryview, key: Key, sections: Sections) -> list[memoryview]:
    """One buffer per section, checked; views of `data` unless it was compressed.

    Args:
        data: The object, padding behind it allowed.
        key: What was asked for.
        sections: What this engine's layout expects.

    Raises:
        CorruptObject: anything is not as it was written; `why` says what.
    """
    header = _read_header(data)
    meta = _meta(data, header)
    if meta.get("key") != key.name:
        raise CorruptObject("key", f"object {key.name[:16]} holds the bytes of {str(meta.get('key'))[:16]}")
    if meta.get("sections") != [list(section) for section in sections]:
        raise CorruptObject(
            "layout", f"object {key.name[:16]} has sections {meta.get('sections')}, not {sections}"
        )
    payload = data[header.size : header.size + header.payload]
    if payload.nbytes < header.payload:
        raise CorruptObject(
            "truncated", f"object {key.name[:16]} ends {header.payload - payload.nbytes} bytes early"
        )
    if xxhash.xxh3_128_digest(payload) != header.checksum:
        raise CorruptObject(
            "checksum", f"the payload of object {key.name[:16]} has changed since it was written"
        )
    if header.raw != sum(section.nbytes for section in sections):  # before anything of that size is allocated
        raise CorruptObject("layout", f"object {key.name[:16]} holds {header.raw} bytes")
    raw = _decompress(payload, header.raw) if header.flags & _ZSTD else payload
    if raw.nbytes != header.raw:
        raise CorruptObject("truncated", f"object {key.name[:16]} holds {raw.nbytes} bytes, not {header.raw}")
    values, offset = [], 0
    for section in sections:
        values.append(raw[offset : offset + section.nbytes])
        offset += section.nbytes
    return values


def verify(data: memoryview, key: Key) -> None:
    """`decode` where the layout is not known: the object must be whole and must be this key's.

    Raises:
        CorruptObject: it is not.
    """
    sections = _meta(data, _read_header(data)).get("sections")
    if not isinstance(sections, list) or not all(isinstance(s, list) and len(s) == 2 for s in sections):
        raise CorruptObject("header", f"object {key.name[:16]} names no sections")
    decode(data, key, tuple(Section(str(name), int(nbytes)) for name, nbytes in sections))


class _Header(NamedTuple):
    flags: int
    size: int
    payload: int
    raw: int
    checksum: bytes


def _header(
    key: Key, sections: Sections, flags: int, payload: Sequence[Buffer], raw: int, checksum: bytes
) -> bytes:
    meta = json.dumps({"key": key.name, "sections": sections}, separators=(",", ":")).encode()
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
