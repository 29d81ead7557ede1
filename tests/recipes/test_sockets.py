"""Who listens on a port."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_deepinfer.recipes.sockets import holder

TCP = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"


def line(port: int, state: str, inode: int) -> str:
    return (
        f"   0: 0100007F:{port:04X} 00000000:0000 {state} 00000000:00000000 00:00000000 00000000     0     "
        f"   0 {inode} 1\n"
    )


def test_a_free_port_has_no_holder() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert holder(port) is None


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_another_process_is_named(family: socket.AddressFamily) -> None:
    host = "127.0.0.1" if family == socket.AF_INET else "::1"
    code = (
        f"import socket, sys; s = socket.create_server(({host!r}, 0), family={int(family)}); "
        "print(s.getsockname()[1], flush=True); sys.stdin.read()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], text=True, **pipes) as process:  # type: ignore[call-overload]
        port = process.stdout.readline()
        if not port:
            pytest.skip("no IPv6 here")
        comm = Path(f"/proc/{process.pid}/comm").read_text().strip()
        assert holder(int(port)) == f"{comm} ({process.pid})"
        process.stdin.close()


def test_connections_and_other_ports_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "tcp").write_text(TCP + line(80, "01", 5) + line(81, "0A", 6))
    assert holder(80, tmp_path) is None
    assert holder(82, tmp_path) is None


def test_another_user_s_process_cannot_be_named(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "tcp").write_text(TCP + line(80, "0A", 5))
    (tmp_path / "7" / "fd").mkdir(parents=True)
    os.symlink("socket:[6]", tmp_path / "7" / "fd" / "3")
    os.symlink("/dev/null", tmp_path / "7" / "fd" / "4")
    assert holder(80, tmp_path) == "another user's process"
    os.symlink("socket:[5]", tmp_path / "7" / "fd" / "5")
    assert holder(80, tmp_path) == "a process (7)"
    (tmp_path / "7" / "comm").write_text("nginx\n")
    assert holder(80, tmp_path) == "nginx (7)"


def test_a_system_without_proc_has_no_holder(tmp_path: Path) -> None:
    assert holder(80, tmp_path) is None
