"""Codec: what was written comes back, and nothing else does."""

from __future__ import annotations

import struct

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_deepinfer.store.codec import (
    ALIGNMENT,
    FAULTS,
    PIECE,
    Section,
    decode,
    encode,
    open_object,
    verify,
)
from vllm_deepinfer.store.errors import CorruptObject
from vllm_deepinfer.store.keys import chain

KEY, OTHER = chain(bytes(32), range(8), 4)
SECTIONS = (Section("full 0", 6), Section("window 1", 3))
VALUES = (b"abcdef", b"xyz")


def whole(level: int | None = None) -> bytearray:
    return bytearray(b"".join(bytes(p) for p in encode(KEY, SECTIONS, VALUES, level)))


def fault(data: bytes | bytearray, **changes: object) -> str:
    asked = {"key": KEY, "sections": SECTIONS, **changes}
    with pytest.raises(CorruptObject) as caught:
        decode(memoryview(data), asked["key"], asked["sections"])  # type: ignore[arg-type]
    assert caught.value.why in FAULTS
    assert "\n" not in str(caught.value)
    return caught.value.why


@pytest.mark.parametrize("level", [None, 1, 19])
@given(
    values=st.lists(st.binary(min_size=1, max_size=2_000), min_size=1, max_size=5), pad=st.integers(0, 900)
)
def test_round_trip_with_padding(level: int | None, values: list[bytes], pad: int) -> None:
    sections = tuple(Section(f"s{i}", len(v)) for i, v in enumerate(values))
    parts = encode(KEY, sections, values, level)
    assert memoryview(parts[0]).nbytes % ALIGNMENT == 0
    data = memoryview(b"".join(bytes(p) for p in parts) + bytes(pad))
    assert [bytes(v) for v in decode(data, KEY, sections)] == values
    verify(data, KEY)


def test_stored_bytes_are_views_not_copies() -> None:
    data = whole()
    (first, _) = decode(memoryview(data), KEY, SECTIONS)
    data[ALIGNMENT] = ord("A")
    assert bytes(first) == b"Abcdef"
    value = bytearray(b"abcdef")
    assert encode(KEY, SECTIONS, [value, b"xyz"])[1].obj is value  # type: ignore[union-attr]


@pytest.mark.parametrize("level", [None, 3])
def test_every_single_bit_flip_is_found(level: int | None) -> None:
    data = whole(level)
    for place in range(len(data)):
        for bit in (0, 7):
            data[place] ^= 1 << bit
            assert fault(data)
            with pytest.raises(CorruptObject):
                verify(memoryview(data), KEY)
            data[place] ^= 1 << bit
    assert [bytes(v) for v in decode(memoryview(data), KEY, SECTIONS)] == list(VALUES)


def test_every_truncation_is_found() -> None:
    data = whole()
    assert {fault(data[:length]) for length in range(len(data))} == {"truncated"}


def test_a_swapped_object_is_found() -> None:
    assert fault(whole(), key=OTHER) == "key"


@pytest.mark.parametrize(
    "sections",
    [
        (Section("full 0", 9),),
        (Section("full 0", 3), Section("window 1", 6)),
        (Section("window 1", 6), Section("full 0", 3)),
        (*SECTIONS, Section("more", 1)),
    ],
)
def test_another_layout_is_found(sections: tuple[Section, ...]) -> None:
    assert fault(whole(), sections=sections) == "layout"


def test_another_version_is_named() -> None:
    data = whole()
    struct.pack_into("<H", data, 8, 2)
    with pytest.raises(CorruptObject, match="layout version 2, this is version 1"):
        decode(memoryview(data), KEY, SECTIONS)


def test_a_payload_of_zeros_is_found() -> None:
    """What a file system gives for a block that was never written."""
    data = whole()
    data[ALIGNMENT:] = bytes(len(data) - ALIGNMENT)
    assert fault(data) == "checksum"
    assert fault(bytes(len(data))) == "magic"


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(max_size=1_500))
def test_noise_is_never_an_object(noise: bytes) -> None:
    assert fault(noise)
    assert fault(bytes(whole()[:64]) + noise)


def test_compression_shrinks_and_a_missing_package_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    sections, zeros = (Section("z", 100_000),), [bytes(100_000)]
    small = b"".join(bytes(p) for p in encode(KEY, sections, zeros, 1))
    assert len(small) < 2_000
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    assert fault(small, sections=sections) == "compression"


@pytest.mark.parametrize("values", [[b"abcdef"], [b"abcdef", b"xy"], [b"abcdef", b"xyz", b""]])
def test_values_must_fit_their_sections(values: list[bytes]) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        encode(KEY, SECTIONS, values)


def test_copied_and_checked_in_one_pass() -> None:
    """What arrives is what was stored, whatever the piece; nothing counts before `finish`."""
    sections = (Section("a", 3 * PIECE + 5), Section("b", 7))
    values = (bytes(range(256)) * (3 * PIECE // 256) + b"abcde", b"1234567")
    data = bytearray(b"".join(bytes(p) for p in encode(KEY, sections, values)))
    targets = [memoryview(bytearray(s.nbytes)) for s in sections]
    opened = open_object(memoryview(data), KEY, sections)
    opened.copy_to(targets)
    opened.finish()
    assert tuple(bytes(t) for t in targets) == values
    for place in (ALIGNMENT, ALIGNMENT + 2 * PIECE, len(data) - 1):
        data[place] ^= 1
        opened = open_object(memoryview(data), KEY, sections)
        opened.copy_to(targets)
        with pytest.raises(CorruptObject, match="has changed"):
            opened.finish()
        data[place] ^= 1


def test_bytes_that_nobody_checked_are_no_success() -> None:
    opened = open_object(memoryview(whole()), KEY, SECTIONS)
    opened.check(opened.values[0])
    with pytest.raises(AssertionError, match="3 bytes of a payload were not checked"):
        opened.finish()


def test_a_compressed_object_is_checked_before_it_is_decompressed() -> None:
    opened = open_object(memoryview(whole(3)), KEY, SECTIONS)
    opened.finish()
    assert [bytes(v) for v in opened.values] == list(VALUES)


def test_a_header_in_other_words_is_read_all_the_same() -> None:
    """The quick comparison of the header's text is a short cut, not the format."""
    import xxhash

    data = whole()
    text = bytes(data).partition(b"{")[2].partition(b"}")[0]
    spaced = b"{" + text.replace(b'":', b'": ') + b"}"
    start = data.index(b"{")
    data[start : start + len(spaced)] = spaced
    own = start - 16
    data[own:start] = bytes(16)
    data[own:start] = xxhash.xxh3_128_digest(bytes(data[:ALIGNMENT]))
    assert [bytes(v) for v in decode(memoryview(data), KEY, SECTIONS)] == list(VALUES)
    assert fault(data, key=OTHER) == "key"
    assert fault(data, sections=(Section("full 0", 9),)) == "layout"
