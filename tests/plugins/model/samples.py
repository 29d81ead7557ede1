"""Configs, checkpoints and models that the tests of the model start from."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from vllm_deepinfer.checkpoint.config import TextConfig
from vllm_deepinfer.checkpoint.options import TinyOptions
from vllm_deepinfer.checkpoint.tiny import write_checkpoint

from .engines import FIXTURES, NAMES

Golden = dict[int, tuple[torch.Tensor, torch.Tensor]]


def config_fields(name: str = NAMES[0]) -> dict[str, Any]:
    """A fixture's whole config.json."""
    fields: dict[str, Any] = json.loads((FIXTURES / name / "config.json").read_text())
    return fields


def text_config(name: str = NAMES[0], /, **changes: Any) -> TextConfig:
    """A fixture's text_config with fields replaced."""
    return TextConfig(**(config_fields(name)["text_config"] | changes))


@cache
def backbone(name: str = NAMES[0], dtype: torch.dtype = torch.float32) -> Any:
    """A fixture's plain form. Shared between tests: nobody may change it."""
    from vllm_deepinfer_plugins.model.weights import load_backbone

    return load_backbone(FIXTURES / name, dtype)


def variant(name: str = NAMES[0], /, *, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """The plain form with a fixture's weights under a changed config, which implies the same tensors."""
    from tokenizers import Tokenizer
    from vllm_deepinfer_plugins.model.backbone import Backbone

    from vllm_deepinfer.checkpoint.engram import EngramHash

    config = text_config(name, **changes)
    tokenizer = Tokenizer.from_file(str(FIXTURES / name / "tokenizer.json"))
    model = Backbone(config, EngramHash.build(config, tokenizer), dtype)
    model.load_state_dict(backbone(name, dtype).state_dict())
    return model


@cache
def golden(name: str) -> Golden:
    """Token ids [length] and logits [length, vocab] by length, made by another implementation."""
    tensors = load_file(FIXTURES / name / "golden.safetensors")
    lengths = [int(key.removeprefix("ids.")) for key in tensors if key.startswith("ids.")]
    return {length: (tensors[f"ids.{length}"].long(), tensors[f"logits.{length}"]) for length in lengths}


def divergence(reference: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """KL(reference ‖ ours) in nats of each row of two logit arrays [rows, vocab]."""
    wanted, ours = reference.double().log_softmax(-1), logits.double().log_softmax(-1)
    return (wanted.exp() * (wanted - ours)).sum(-1)


def assert_parity(reference: torch.Tensor, logits: torch.Tensor) -> None:
    """Mean KL ≤ 1e-5 and max ≤ 1e-3 nats, and the same choice where the reference's margin exceeds 0.05.

    The references were made with AVX-512. A CPU without it sums in another order, which decides some ties
    between index scores the other way, and rows behind read the result: one in twelve may differ by more.
    """
    assert logits.shape == reference.shape
    kl = divergence(reference, logits)
    same = torch.ones(len(kl), dtype=torch.bool)
    if not torch.cpu._is_avx512_supported():
        same = kl <= 1e-4
        assert float(same.float().mean()) >= 11 / 12 and float(kl.median()) <= 1e-9
    assert float(kl[same].mean()) <= 1e-5
    assert float(kl[same].max()) <= 1e-3
    best = reference.topk(2).values
    clear = (best[:, 0] - best[:, 1] > 0.05) & same
    assert torch.equal(logits.argmax(-1)[clear], reference.argmax(-1)[clear])


def tiny(folder: Path, **options: Any) -> Path:
    """Write a small checkpoint into ``folder`` / checkpoint."""
    return write_checkpoint(folder / "checkpoint", TinyOptions(**options)).folder


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Standard normal values that depend on shape and seed alone."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def token_ids(length: int, vocab: int = 512, seed: int = 0) -> torch.Tensor:
    """Random ids above the control tokens."""
    return torch.randint(11, vocab, (length,), generator=torch.Generator().manual_seed(seed))
