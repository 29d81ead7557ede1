"""Time to first token of a 16k-token prompt, cold and from the store, on a real engine in its own process."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from vllm_deepinfer.bench.gateway.api import why_not

MODULE = "vllm_deepinfer_plugins.bench.warm_first_token"
_LIMIT_S = 900.0


@dataclass(frozen=True)
class FirstToken:
    """Seconds of one prompt: cold, and again when only the store has its prefix."""

    cold: float
    warm: float
    loaded_tokens: int


def measure(rounds: int) -> list[FirstToken]:
    """Run the engine's process.

    Raises:
        RuntimeError: no engine is installed, or it failed.
    """
    reason = why_not()
    if reason is not None:
        raise RuntimeError(reason)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rounds.json"
        command = [sys.executable, "-m", MODULE, folder, str(rounds), str(out)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
            raise RuntimeError(f"the engine's process failed: {lines[-1]}")
        return [FirstToken(**entry) for entry in json.loads(out.read_text())]
