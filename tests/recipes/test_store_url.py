"""Addresses of stores."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vllm_deepinfer.recipes.store_url import FORM, unreachable


def test_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a b").mkdir()
    assert unreachable(str(tmp_path), 1) is None
    assert unreachable(f"directory:{tmp_path}/a b?direct=1", 1) is None
    assert unreachable(f"{tmp_path}/no", 1) == f"there is no folder {tmp_path}/no, make it first"
    (tmp_path / "file").touch()
    assert unreachable(f"{tmp_path}/file", 1) == f"there is no folder {tmp_path}/file, make it first"
    assert unreachable("kv", 1) == "a relative folder is another one on each node, write it from / on"


def test_nothing_is_made(tmp_path: Path) -> None:
    unreachable(f"memory:{tmp_path}/ring?capacity=8GiB,{tmp_path}/no", 1)
    assert list(tmp_path.iterdir()) == []


def test_shared_memory() -> None:
    assert unreachable("memory:prefixes?capacity=8GiB", 1) is None


def test_tiers_are_all_looked_at(tmp_path: Path) -> None:
    assert unreachable(f"memory:x, {tmp_path}", 1) is None
    assert unreachable(f"memory:x, {tmp_path}/no", 1) == f"there is no folder {tmp_path}/no, make it first"


def test_a_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert unreachable(f"s3://bucket/prefix?endpoint=http://127.0.0.1:{port}", 5) is None
    assert unreachable(f"s3://bucket?endpoint=http://127.0.0.1:{port}&region=x", 5) == (
        f"127.0.0.1 port {port} cannot be reached (connection refused), start the store or correct it"
    )
    assert unreachable("s3://bucket", 5) is None  # Amazon's own: asked by the engines


@pytest.mark.parametrize(
    ("address", "clause"),
    [
        ("", FORM),
        ("memory:", FORM),
        ("ftp://host:1", FORM),
        ("s3://b?endpoint=host", f"the endpoint is no http or https address, {FORM}"),
        (
            "s3://b?endpoint=http://host:x",
            f"the endpoint is no address (Port could not be cast to integer value as 'x'), {FORM}",
        ),
        ("s3://b?endpoint=http://[::1:5", f"the endpoint is no address (Invalid IPv6 URL), {FORM}"),
    ],
)
def test_what_is_no_address(address: str, clause: str) -> None:
    assert unreachable(address, 1) == clause


def test_a_server_that_does_not_answer_is_given_up() -> None:
    """A listener whose queue is full: further connections get no answer."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port = listener.getsockname()[1]
        fillers = []
        for _ in range(4):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
            fillers.append(filler)
        time.sleep(0.05)
        assert unreachable(f"s3://b?endpoint=http://127.0.0.1:{port}", 0.2) == (
            f"127.0.0.1 port {port} cannot be reached (timed out), start the store or correct it"
        )
        for filler in fillers:
            filler.close()


@given(st.text(max_size=30).filter(lambda text: "endpoint" not in text))
@example("~nobody-of-that-name/store")  # pathlib's expanduser raises for it
def test_no_text_raises(text: str) -> None:
    clause = unreachable(text, 0.01)
    assert clause is None or clause
