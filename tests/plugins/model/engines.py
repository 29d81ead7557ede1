"""In-process engines on the fixture checkpoints, one after another in a test process."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# One thread: at these sizes a second one costs more in barriers than it computes. Before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

import torch

FIXTURES = Path(__file__).parent / "fixtures"
NAMES = ("deepseek-v4.1-tiny", "deepseek-v4.1-tiny-no-candidates", "deepseek-v4.1-tiny-dspark")
WEIGHTS = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def checkpoint(name: str, folder: Path) -> Path:
    """A copy of a fixture without the golden tensors, which are no weights."""
    target = folder / name
    target.mkdir(parents=True, exist_ok=True)
    for file in WEIGHTS:
        shutil.copy(FIXTURES / name / file, target / file)
    return target


@contextmanager
def engine(path: Path, *, invariant: bool = False, **settings: Any) -> Iterator[Any]:
    """An offline ``LLM`` in this process with 2,048 + 64 tokens of context, gone at the end of the block.

    Without bounded replay, unless ``additional_config`` says otherwise: the model's arithmetic is the matter.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    defaults: dict[str, Any] = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 2112,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 4096,
        "disable_log_stats": False,
        "additional_config": {
            "deepinfer": {"batch_invariant": invariant, "encoder_replay": False, "decoder_replay": False}
        },
    }
    llm = LLM(str(path), **{**defaults, **settings})
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def greedy(llm: Any, prompts: list[list[int]], tokens: int = 12) -> list[list[int]]:
    """Greedy continuations of token-id prompts, submitted together."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def prompts(lengths: list[int], vocab: int = 512, seed: int = 7) -> list[list[int]]:
    """Random token ids above the control tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(11, vocab, (length,), generator=generator).tolist() for length in lengths]
