"""A vLLM load format that fills any model with random weights under which the output depends on the context.

vLLM's `dummy` format draws every weight from ±1e-3: attention and experts then add nothing to the residual,
greedy output falls into a cycle of two tokens, and no run could show that the model really works. Here a
matrix keeps the scale of what it multiplies. V4.1 needs none of this: its checkpoint is written by
`vllm_deepinfer.checkpoint.tiny`.
"""

from __future__ import annotations

import math
import zlib

import torch
from torch import nn

LOAD_FORMAT = "deepinfer_random"


def fill(name: str, tensor: torch.Tensor) -> None:
    """Fill one parameter in place; the values follow from its name and shape.

    A norm's weight is 1, any other vector normal with deviation 0.1 (biases, sinks, mHC bases); an embedding
    has deviation 1, any other matrix or stack of matrices [..., out, in] 1/√in. Integer tensors stay as they
    are.
    """
    if not tensor.is_floating_point():
        return
    if "norm" in name:
        tensor.fill_(1.0)
        return
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    values = torch.randn(tensor.shape, generator=generator, dtype=torch.float32)
    tensor.copy_(values * _deviation(name, tensor))


def _deviation(name: str, tensor: torch.Tensor) -> float:
    if tensor.dim() < 2:
        return 0.1
    return 1.0 if "embed" in name else 1 / math.sqrt(tensor.shape[-1])


def register() -> None:
    """Teach this process the load format `deepinfer_random`. Idempotent."""
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader, register_model_loader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    try:
        get_model_loader(LoadConfig(load_format=LOAD_FORMAT))
        return
    except ValueError:
        pass

    @register_model_loader(LOAD_FORMAT)
    class RandomModelLoader(DummyModelLoader):
        @torch.no_grad()
        def load_weights(self, model: nn.Module, model_config: object) -> None:
            for name, parameter in model.named_parameters():
                fill(name, parameter.data)
