from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_deepinfer.gateway.tokens.cache import PieceCache

ENTRY = 256


def ids(*values: int) -> "array[int]":
    return array("I", values)


def test_what_was_put_comes_back() -> None:
    cache = PieceCache(10_000, 100)
    key = cache.digest("text")
    assert cache.get(key) is None
    cache.put(key, ids(1, 2, 3))
    assert cache.get(key) == (1, 2, 3)
    assert cache.get(cache.digest("text")) == (1, 2, 3)
    assert cache.get(cache.digest("texT")) is None


def test_digests_are_128_bits_under_a_key_of_their_own() -> None:
    one, other = PieceCache(1, 1), PieceCache(1, 1)
    assert len(one.digest("x")) == 16
    assert one.digest("x") == one.digest("x") != other.digest("x")


def test_a_lone_surrogate_has_no_digest() -> None:
    with pytest.raises(UnicodeEncodeError):
        PieceCache(1, 1).digest("\ud800")


def test_memory_is_counted_as_arrays_then_as_tuples() -> None:
    cache = PieceCache(10_000, 100)
    key = cache.digest("a")
    cache.put(key, ids(1, 2, 3))
    assert cache.size_bytes == ENTRY + 12
    cache.get(key)
    assert cache.size_bytes == ENTRY + 24
    cache.put(key, ids(1))
    assert cache.size_bytes == ENTRY + 4


def test_used_entries_share_their_integers() -> None:
    cache = PieceCache(10_000, 2000)
    first, second = cache.digest("a"), cache.digest("b")
    cache.put(first, ids(1999))
    cache.put(second, ids(1999))
    assert cache.get(first)[0] is cache.get(second)[0]  # type: ignore[index]


def test_the_longest_unused_goes_first() -> None:
    cache = PieceCache(2 * (ENTRY + 8), 100)
    keys = [cache.digest(name) for name in "abc"]
    cache.put(keys[0], ids(1))
    cache.put(keys[1], ids(2))
    assert cache.get(keys[0]) == (1,)
    cache.put(keys[2], ids(3))
    assert [cache.get(key) for key in keys] == [(1,), None, (3,)]


def test_an_entry_larger_than_the_bound_is_not_kept() -> None:
    cache = PieceCache(ENTRY, 100)
    cache.put(cache.digest("a"), ids(1))
    assert (len(cache), cache.size_bytes) == (0, 0)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40), st.booleans())))
def test_never_above_the_bound_and_never_wrong(steps: list[tuple[int, int, bool]]) -> None:
    cache = PieceCache(3 * ENTRY + 100, 100)
    truth: dict[bytes, list[int]] = {}
    for name, length, put in steps:
        key = cache.digest(str(name))
        if put:
            truth[key] = [name] * length
            cache.put(key, array("I", truth[key]))
        else:
            found = cache.get(key)
            assert found is None or list(found) == truth[key]
        assert cache.size_bytes <= 3 * ENTRY + 100
    sizes = [ENTRY + len(e) * (4 if isinstance(e, array) else 8) for e in cache._entries.values()]
    assert cache.size_bytes == sum(sizes)
