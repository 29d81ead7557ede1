"""`make serve`: a taken port is told at once, the checkpoint is whole or absent, the server's end is ours."""

from __future__ import annotations

import http.server
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools import serve


@pytest.fixture
def listener() -> Iterator[int]:
    """A port that something listens on."""
    with socket.socket() as server:
        server.bind((serve.HOST, 0))
        server.listen()
        yield server.getsockname()[1]


def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind((serve.HOST, 0))
        return int(probe.getsockname()[1])


def test_a_free_port_is_no_problem() -> None:
    assert serve.free_port(unused_port()) is None


def test_a_taken_port_is_one_sentence(listener: int) -> None:
    assert serve.free_port(listener) == (
        f"Port {listener} of 127.0.0.1 is taken: stop what listens there, or choose with PORT=8001."
    )


@pytest.mark.parametrize("port", [-1, 0, 65536])
def test_a_number_that_is_no_port(port: int) -> None:
    assert serve.free_port(port) == f"Port {port} is not between 1 and 65535."


def test_main_refuses_a_taken_port_before_it_writes_a_checkpoint(
    listener: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve, "make_checkpoint", lambda program: pytest.fail("wrote a checkpoint"))
    monkeypatch.setattr(sys, "argv", ["serve", "--port", str(listener)])
    assert serve.main() == 2
    assert capsys.readouterr().err.startswith(f"make serve: Port {listener} of 127.0.0.1 is taken")


class Health(http.server.BaseHTTPRequestHandler):
    status = 503

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_ready_is_a_health_check_that_answers_200(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not serve.is_ready(unused_port())
    with http.server.ThreadingHTTPServer((serve.HOST, 0), Health) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert not serve.is_ready(server.server_port)
        monkeypatch.setattr(Health, "status", 200)
        assert serve.is_ready(server.server_port)
        server.shutdown()


@pytest.fixture
def writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program in the place of `vllm-deepinfer` that writes a checkpoint and counts how often it ran."""
    monkeypatch.setattr(serve, "ROOT", tmp_path)
    monkeypatch.setattr(serve, "CHECKPOINT", tmp_path / ".cache" / "tiny-v4.1")
    source = tmp_path / "vllm_deepinfer" / "checkpoint" / "a.py"
    source.parent.mkdir(parents=True)
    source.touch()
    os.utime(source, (1, 1))
    program = tmp_path / "vllm-deepinfer"
    program.write_text(
        '#!/bin/sh\nmkdir -p "$2" && echo $1 > "$2/config.json" && echo run >> runs\nexit ${FAIL:-0}\n'
    )
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    return program


def runs() -> int:
    return Path("runs").read_text().count("run")


def test_the_checkpoint_is_written_once(writer: Path) -> None:
    assert [serve.make_checkpoint(writer) for _ in range(2)] == [0, 0]
    assert (serve.CHECKPOINT / "config.json").read_text() == "tiny-checkpoint\n"
    assert runs() == 1


def test_a_changed_writer_writes_it_again(writer: Path) -> None:
    serve.make_checkpoint(writer)
    changed = Path("vllm_deepinfer/checkpoint/a.py")
    os.utime(changed, (time.time() + 10, time.time() + 10))
    serve.make_checkpoint(writer)
    assert runs() == 2


def test_a_failed_write_leaves_no_checkpoint(writer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIL", "2")
    assert serve.make_checkpoint(writer) == 2
    assert not serve.CHECKPOINT.exists()
    monkeypatch.delenv("FAIL")
    assert serve.make_checkpoint(writer) == 0
    assert [path.name for path in serve.CHECKPOINT.parent.iterdir()] == ["tiny-v4.1"]


SERVER = """#!{python}
import http.server, sys
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
        if self.path == "/stop": sys.exit
    def log_message(self, *_): pass
print("arguments", *sys.argv[1:], flush=True)
server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Health)
server.handle_request()
sys.exit(7)
"""


def test_serve_says_what_to_curl_and_ends_with_the_servers_status(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("signal.signal", lambda number, handler: None)  # pytest's own handlers stay
    program = tmp_path / "vllm"
    program.write_text(SERVER.format(python=sys.executable))
    program.chmod(0o755)
    port = unused_port()
    assert serve.serve(program, port, ["--max-model-len", "512"]) == 7
    shown = capfd.readouterr().out
    assert f"arguments serve {serve.CHECKPOINT} --served-model-name tiny-v4.1 --host 127.0.0.1" in shown
    assert "--enforce-eager --max-model-len 512" in shown
    assert f"curl -N http://127.0.0.1:{port}/v1/chat/completions" in shown


def test_a_server_that_dies_at_once_is_not_called_ready(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    program = tmp_path / "vllm"
    program.write_text("#!/bin/sh\nexit 3\n")
    program.chmod(0o755)
    assert serve.serve(program, unused_port(), []) == 3
    assert "Ready" not in capfd.readouterr().out
