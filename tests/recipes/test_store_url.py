"""Addresses of stores."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_deepinfer.recipes.store_url import unreachable

FORM = "write file:///folder or tcp://host:port"


def test_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a b").mkdir()
    assert unreachable(tmp_path.as_uri(), 1) is None
    assert unreachable((tmp_path / "a b").as_uri(), 1) is None
    assert unreachable(f"file://{tmp_path}/no", 1) == f"there is no folder {tmp_path}/no, make it first"
    (tmp_path / "file").touch()
    assert unreachable(f"file://{tmp_path}/file", 1) == f"there is no folder {tmp_path}/file, make it first"


def test_a_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        for scheme in ("tcp", "http", "https"):
            assert unreachable(f"{scheme}://127.0.0.1:{port}", 5) is None
    assert unreachable(f"tcp://127.0.0.1:{port}", 5) == (
        f"127.0.0.1 port {port} cannot be reached (connection refused), start the store or correct it"
    )


@pytest.mark.parametrize(
    ("url", "clause"),
    [
        ("", FORM),
        ("/var/cache", FORM),
        ("ftp://host:1", FORM),
        ("tcp://:5", FORM),
        ("tcp://host", "it names no port, write tcp://host:port"),
        ("tcp://host:x", "this is no address (Port could not be cast to integer value as 'x'), " + FORM),
        ("tcp://[::1:5", "this is no address (Invalid IPv6 URL), " + FORM),
    ],
)
def test_what_is_no_address(url: str, clause: str) -> None:
    assert unreachable(url, 1) == clause


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
        assert unreachable(f"tcp://127.0.0.1:{port}", 0.2) == (
            f"127.0.0.1 port {port} cannot be reached (timed out), start the store or correct it"
        )
        for filler in fillers:
            filler.close()


@given(st.text(max_size=30).filter(lambda text: "://" not in text or text.startswith("file")))
def test_no_text_raises(text: str) -> None:
    clause = unreachable(text, 0.01)
    assert clause is None or clause
