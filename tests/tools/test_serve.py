"""`make serve-one`: a taken port and a missing checkpoint are told at once, the end is ours."""

from __future__ import annotations

import http.server
import os
import signal
import socket
import subprocess
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


def test_main_refuses_a_taken_port_before_it_starts_a_server(
    listener: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve, "serve", lambda *_: pytest.fail("started a server"))
    monkeypatch.setattr(sys, "argv", ["serve", "--port", str(listener)])
    assert serve.main() == 2
    assert capsys.readouterr().err.startswith(f"make serve-one: Port {listener} of 127.0.0.1 is taken")


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


def test_without_the_trained_checkpoint_it_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_DEEPINFER_TRAINED", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["serve", "--port", str(unused_port())])
    assert serve.main() == 2
    told = capsys.readouterr().err
    assert told.startswith(f"make serve-one: {tmp_path} has no config.json") and told.count("\n") == 1


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
    program = tmp_path / "vllm-deepinfer"
    program.write_text(SERVER.format(python=sys.executable))
    program.chmod(0o755)
    port = unused_port()
    assert serve.serve(program, tmp_path, port, ["--max-model-len", "512"]) == 7
    shown = capfd.readouterr().out
    assert f"arguments gateway --model {tmp_path} --served-model-name tiny-v4.1" in shown
    assert "--engine-args --enforce-eager --dtype float32 --max-model-len 8192 --max-model-len 512" in shown
    assert f"curl -N http://127.0.0.1:{port}/v1/chat/completions" in shown


def test_a_server_that_dies_at_once_is_not_called_ready(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    program = tmp_path / "vllm-deepinfer"
    program.write_text("#!/bin/sh\nexit 3\n")
    program.chmod(0o755)
    assert serve.serve(program, tmp_path, unused_port(), []) == 3
    assert "Ready" not in capfd.readouterr().out


LEAVES_A_CHILD = """#!/bin/sh
sleep 600 &
echo $! > child
exit 3
"""


def test_nothing_of_a_dead_server_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    monkeypatch.chdir(tmp_path)
    program = tmp_path / "vllm-deepinfer"
    program.write_text(LEAVES_A_CHILD)
    program.chmod(0o755)
    assert serve.serve(program, tmp_path, unused_port(), []) == 3
    stat = Path(f"/proc/{Path('child').read_text().strip()}/stat")
    deadline = time.monotonic() + 30
    while stat.exists() and stat.read_text().split()[2] != "Z":
        assert time.monotonic() < deadline, "the child still runs"
        time.sleep(0.01)


SLOW = """#!{python}
import http.server, pathlib, signal, sys
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if READY else 503); self.end_headers()
        pathlib.Path("asked").touch()
    def log_message(self, *_): pass
def finish(*_):
    pathlib.Path("asked-to-end").touch()
    if ENDS: sys.exit(0)
signal.signal(signal.SIGTERM, finish)
signal.signal(signal.SIGINT, signal.SIG_IGN)
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Health).serve_forever()
"""


def start(folder: Path, ready: bool, ends: bool) -> subprocess.Popen[str]:
    """`serve` in a process of its own, for signal handlers are the process's."""
    program = folder / "vllm"
    program.write_text(
        SLOW.format(python=sys.executable).replace("READY", str(ready)).replace("ENDS", str(ends))
    )
    program.chmod(0o755)
    imports = "from tools import serve; from pathlib import Path; import sys;"
    code = f"{imports} sys.exit(serve.serve(Path({str(program)!r}), Path(), {unused_port()}, []))"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.Popen(
        [sys.executable, "-c", code], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
    )


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + 60
    while not file.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def wait_for_ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout
    for line in process.stdout:
        if line.startswith("Ready"):
            return


def test_ctrl_c_while_the_server_loads_ends_it_at_once(tmp_path: Path) -> None:
    with start(tmp_path, ready=False, ends=False) as process:
        wait_for(tmp_path / "asked")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) != 0
    assert not (tmp_path / "asked-to-end").exists()


def test_ctrl_c_lets_a_server_that_serves_finish(tmp_path: Path) -> None:
    with start(tmp_path, ready=True, ends=True) as process:
        wait_for_ready(process)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    assert (tmp_path / "asked-to-end").exists()


def test_a_second_ctrl_c_does_not_wait(tmp_path: Path) -> None:
    with start(tmp_path, ready=True, ends=False) as process:
        wait_for_ready(process)
        process.send_signal(signal.SIGINT)
        wait_for(tmp_path / "asked-to-end")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) != 0
