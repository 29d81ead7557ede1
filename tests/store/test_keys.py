"""Keys: the same in every process, different for everything that changes the KV."""

from __future__ import annotations

import hashlib
import os
import struct
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_deepinfer.store.keys import Image, Key, chain, fingerprint, root

ROOT = root(fingerprint({"model": "m"}))
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)

SCRIPT = """
from vllm_deepinfer.store.keys import Image, chain, fingerprint, root
r = root(fingerprint({"b": [1, "x"], "a": {"d": None, "c": 2.5}}), "tenant", "0/2")
print(chain(r, range(9), 4, [Image("picture", 3, 2)])[-1].name)
"""


def in_process(seed: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_hash_seed_changes_nothing() -> None:
    assert in_process("1") == in_process("4242") == in_process("random")


def test_digest_is_sha256_of_parent_and_tokens() -> None:
    first, second = chain(ROOT, range(10), 4)
    assert first.digest == hashlib.sha256(ROOT + struct.pack("<4I", 0, 1, 2, 3)).digest()
    assert second.digest == hashlib.sha256(first.digest + struct.pack("<4I", 4, 5, 6, 7)).digest()
    assert (first.parent, second.parent) == (ROOT[:8], first.id)
    assert [(k.start, k.tokens) for k in (first, second)] == [(0, 4), (4, 4)]


@given(TOKENS, TOKENS, st.integers(1, 7))
def test_common_runs_are_exactly_the_common_prefix(a: list[int], b: list[int], run: int) -> None:
    common = 0
    while common < min(len(a), len(b)) and a[common] == b[common]:
        common += 1
    ours, theirs = chain(ROOT, a, run), chain(ROOT, b, run)
    assert len(ours) == len(a) // run
    same = [x == y for x, y in zip(ours, theirs, strict=False)]
    assert same == [i < common // run for i in range(len(same))]


@given(TOKENS, st.integers(1, 5), st.data())
def test_a_chain_goes_on_from_any_key(tokens: list[int], run: int, data: st.DataObject) -> None:
    whole = chain(ROOT, tokens, run)
    cut = data.draw(st.integers(0, len(whole)))
    assert chain(ROOT, tokens, run, after=whole[cut - 1] if cut else None) == whole[cut:]


def test_one_token_in_the_last_place_of_a_run_counts() -> None:
    tokens = list(range(16))
    other = [*tokens[:7], 99, *tokens[8:]]
    assert [a == b for a, b in zip(chain(ROOT, tokens, 4), chain(ROOT, other, 4), strict=True)] == [
        True,
        False,
        False,
        False,
    ]


def test_fingerprint_salt_and_shard_make_different_trees() -> None:
    prints = [fingerprint({"dtype": d}) for d in ("fp8", "bf16")]
    roots = {root(p, salt, shard) for p in prints for salt in ("", "a", "b") for shard in ("", "0/2", "1/2")}
    assert len(roots) == 18
    assert root(prints[0], "ab", "c") != root(prints[0], "a", "bc")


def test_fingerprint_ignores_order_and_refuses_what_has_no_stable_text() -> None:
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})
    assert fingerprint({"a": 1}) != fingerprint({"a": "1"})
    with pytest.raises(TypeError):
        fingerprint({"a": {1, 2}})
    with pytest.raises(ValueError):
        fingerprint({"a": float("nan")})


def test_images_count_for_the_runs_they_touch_and_for_all_behind() -> None:
    plain = chain(ROOT, range(16), 4)
    cat = chain(ROOT, range(16), 4, [Image("cat", 6, 3)])
    dog = chain(ROOT, range(16), 4, [Image("dog", 6, 3)])
    moved = chain(ROOT, range(16), 4, [Image("cat", 5, 3)])
    assert [a == b for a, b in zip(plain, cat, strict=True)] == [True, False, False, False]
    assert cat[1:] != dog[1:] and cat[1] != moved[1]
    assert chain(ROOT, range(16), 4, [Image("cat", 6, 3)]) == cat
    two = [Image("cat", 1, 2), Image("dog", 3, 1)]
    assert chain(ROOT, range(4), 4, two) == chain(ROOT, range(4), 4, two[::-1])


@given(st.binary(min_size=32, max_size=32), st.integers(0, 2**31), st.integers(1, 2**20))
def test_names_go_both_ways(digest: bytes, start: int, tokens: int) -> None:
    key = Key(digest, digest[8:16], start, tokens)
    assert Key.parse(key.name) == key
    assert len(key.name) <= 110 and "/" not in key.name


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".tmp",
        "ab" * 32,
        f"{'ab' * 32}.{'cd' * 8}.0.0",
        f"{'AB' * 32}.{'cd' * 8}.0.4",
        f"{'ab' * 32}.{'cd' * 8}.00.4",
        f"{'ab' * 32}.{'cd' * 8}.0.4.1",
        f"{'ab' * 32}.{'cd' * 8}.0.4\n",
    ],
)
def test_other_names_are_no_keys(name: str) -> None:
    assert Key.parse(name) is None


@pytest.mark.parametrize("token", [-1, 2**32, "a", 1.5])
def test_a_token_that_is_no_id_is_named(token: object) -> None:
    with pytest.raises(ValueError, match=repr(token).replace(".", r"\.")):
        chain(ROOT, [1, token], 2)  # type: ignore[list-item]


def test_a_run_has_tokens_and_a_chain_keeps_its_grid() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        chain(ROOT, [1], 0)
    with pytest.raises(ValueError, match="cannot go on at token 4"):
        chain(ROOT, range(9), 3, after=chain(ROOT, range(4), 4)[0])
