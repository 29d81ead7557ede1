"""API keys: what is kept, what is refused."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest
import yaml

from vllm_deepinfer.gateway.errors import ApiError
from vllm_deepinfer.gateway.limits import keys as module
from vllm_deepinfer.gateway.limits.keys import PREFIX, ApiKey, KeyFileError, KeyRing, digest, new_key


def test_a_new_key_is_random_and_only_its_hash_is_kept() -> None:
    key, entry = new_key("bob")
    other, _ = new_key("bob")
    assert key.startswith(PREFIX) and key != other and len(key) >= len(PREFIX) + 43
    assert entry.sha256 == hashlib.sha256(key.encode()).hexdigest()
    assert key not in entry.model_dump_json() and key[len(PREFIX) :] not in repr(entry)


def test_a_bad_name_is_refused() -> None:
    with pytest.raises(KeyFileError, match="name"):
        new_key("a b")


def test_authentication() -> None:
    key, entry = new_key("bob")
    ring = KeyRing([entry])
    assert ring.authenticate(f"Bearer {key}", None) == entry
    assert ring.authenticate(f"bearer  {key} ", None) == entry
    assert ring.authenticate(None, key) == entry
    assert ring.authenticate("Basic xyz", key) == entry
    for authorization, x_api_key in [
        (None, None),
        ("Bearer ", None),
        (f"Basic {key}", None),
        (f"Bearer {key}x", None),
        (None, key[:-1]),
        (f"Bearer {entry.sha256}", None),  # the hash is no key
        ("Bearer wrong", key),  # what was said first counts
    ]:
        with pytest.raises(ApiError) as caught:
            ring.authenticate(authorization, x_api_key)
        assert caught.value.status == 401 and key not in caught.value.message


def test_without_keys_everybody_may_ask() -> None:
    assert KeyRing().authenticate(None, None) is None
    assert KeyRing().authenticate("Bearer x", None) is None


def test_a_key_file(tmp_path: Path) -> None:
    key, entry = new_key("bob")
    file = tmp_path / "keys.yaml"
    file.write_text(yaml.safe_dump([entry.model_dump() | {"requests_per_minute": 5}]))
    found = KeyRing.load(file).authenticate(None, key)
    assert found is not None and found.requests_per_minute == 5 and found.tokens_per_minute is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "must be a list of keys"),
        ("[]", "must be a list of keys"),
        ("a: b", "must be a list of keys"),
        ("[1]", "send an object"),
        ("- name: bob", "sha256: this field is required"),
        ("- name: bob\n  sha256: abc", "sha256"),
        ("- name: bob\n  key: sk-x\n  sha256: " + "a" * 64, "key: there is no such field"),
        ("- name: bob\n  sha256: " + "a" * 64 + "\n  tokens_per_minute: 0", "tokens_per_minute"),
        (f"- {{name: a, sha256: {'a' * 64}}}\n- {{name: a, sha256: {'b' * 64}}}", "same name"),
        ("- [", "cannot be read"),
        ("!!python/object/apply:os.system ['true']", "cannot be read"),
    ],
)
def test_a_bad_key_file_is_one_sentence(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(text)
    with pytest.raises(KeyFileError, match=says) as caught:
        KeyRing.load(file)
    assert "\n" not in str(caught.value)


def test_a_missing_key_file(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match="cannot be read"):
        KeyRing.load(tmp_path / "none.yaml")


def test_digest_is_what_the_file_holds() -> None:
    assert ApiKey(name="x", sha256=digest("k")).sha256 == hashlib.sha256(b"k").hexdigest()


def test_the_readmes_key_file_is_one(tmp_path: Path) -> None:
    readme = Path(module.__file__).parents[1] / "README.md"
    (block,) = re.findall(r"```yaml\n(.*?)```", readme.read_text(encoding="utf-8"), re.DOTALL)
    file = tmp_path / "keys.yaml"
    file.write_text(block, encoding="utf-8")
    (key,) = KeyRing.load(file)._keys.values()
    assert (key.name, key.requests_per_minute, key.min_priority) == ("alice", 60, -10)
