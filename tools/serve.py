"""`make serve-one`: the small trained DeepSeek-V4.1 on one vLLM engine on this CPU, behind the gateway.

Extra arguments go to the vLLM engine: `python -m tools.serve --port 8000 --max-model-len 512`.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from vllm_deepinfer.checkpoint.trained import NAME as MODEL
from vllm_deepinfer.checkpoint.trained import trained_folder
from vllm_deepinfer.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
HOST = "127.0.0.1"

ENGINE = ("--enforce-eager", "--dtype", "float32", "--max-model-len", "8192")
"""Arguments of the engine; those of the command line follow and win."""

SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; the default takes half of the machine's memory
    "VLLM_CACHE_ROOT": str(ROOT / ".cache" / "vllm"),
    "VLLM_CONFIG_ROOT": str(ROOT / ".cache" / "vllm"),
}

READY = f"""
Ready. In another terminal:

  curl -N http://{HOST}:PORT/v1/chat/completions -H 'Content-Type: application/json' -d \\
    '{{"model": "{MODEL}", "stream": true, "max_tokens": 100, "temperature": 0,
      "messages": [{{"role": "user", "content": "Hello"}}]}}'

or the same through OpenAI's and Anthropic's clients (/v1/responses, /v1/messages), or a browser on
http://{HOST}:PORT/status. The model has 5 million parameters: it greets, calls a tool that you give it and
writes JSON of what you say; its facts and sums are often wrong. Ctrl-C stops the server.
"""


def free_port(port: int) -> str | None:
    """None when a server can listen on the port, else one sentence about why not."""
    if not 0 < port < 65536:
        return f"Port {port} is not between 1 and 65535."
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return f"Port {port} of {HOST} is taken: stop what listens there, or choose with PORT=8001."
            return f"Port {port} of {HOST} cannot be used: {error.strerror}."
    return None


def is_ready(port: int) -> bool:
    """True once the server answers its health check."""
    try:
        with urllib.request.urlopen(f"http://{HOST}:{port}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def serve(program: Path, checkpoint: Path, port: int, arguments: list[str]) -> int:
    """Run the gateway until it ends; say what to do once it is ready. Returns its exit status."""
    command = [str(program), "gateway", "--model", str(checkpoint), "--served-model-name", MODEL]
    command += ["--host", HOST, "--port", str(port), "--log-level", "warning"]
    command += ["--engine-args", shlex.join([*ENGINE, *arguments])]
    # In a session of its own the server sees Ctrl-C once, from us, and not a second time from the terminal.
    server = subprocess.Popen(command, env=SETTINGS | os.environ, start_new_session=True)
    stop = Stop(server)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    try:
        while server.poll() is None and not is_ready(port):
            time.sleep(0.5)
        stop.gracefully = True
        if server.poll() is None:
            print(READY.replace("PORT", str(port)), flush=True)
        return server.wait()
    finally:
        end_group(server)


class Stop:
    """What Ctrl-C does: a server that serves may finish its answers, a second Ctrl-C ends it at once.

    While it loads it is ended at once too: vLLM 0.32 drops a signal that arrives before its event loop runs.
    """

    def __init__(self, server: subprocess.Popen[bytes]) -> None:
        self.server = server
        self.gracefully = False

    def __call__(self, number: int, frame: object) -> None:
        """The signal handler."""
        if self.gracefully:
            self.gracefully = False
            self.server.terminate()
        else:
            end_group(self.server)


def end_group(server: subprocess.Popen[bytes]) -> None:
    """End the server and what it left behind: while it loads, its engine process would outlive it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)


def main() -> int:
    """Exit status: the server's, or 2 for a port that cannot be used or a checkpoint that is not there."""
    parser = argparse.ArgumentParser(
        prog="make serve-one", description="the gateway on the small trained DeepSeek-V4.1"
    )
    parser.add_argument("--port", type=int, default=8000)
    options, arguments = parser.parse_known_args()
    problem = free_port(options.port)
    if problem:
        print(f"make serve-one: {problem}", file=sys.stderr)
        return 2
    try:
        checkpoint = trained_folder()
    except UserError as error:
        print(f"make serve-one: {error}.", file=sys.stderr)
        return 2
    return serve(Path(sys.executable).with_name("vllm-deepinfer"), checkpoint, options.port, arguments)


if __name__ == "__main__":
    sys.exit(main())
