"""Sampling beside speculation on a CPU.

To verify drafts, vLLM repeats every request's temperature, top-p and top-k for each of its drafted rows. On
CPUs vLLM 0.32 has a stand-in for that kernel (`utils/cpu_triton_utils.py`, `_expand_kernel_impl`), which
writes into a copy in int64 and throws it away: rows are divided by whatever the memory held, and a request
with a temperature is answered with tokens drawn from noise (compare vllm-project/vllm#42638, for the time
before that stand-in). Here the rows get the values themselves.
"""

from __future__ import annotations

from typing import Any

import torch

KERNEL = "vllm.v1.sample.rejection_sampler.expand_kernel"


def install() -> None:
    """Override vLLM's stand-in, where it is registered already and where it will be. Idempotent."""
    from vllm.triton_utils import dispatcher
    from vllm.utils import cpu_triton_utils

    if cpu_triton_utils._expand_kernel_impl is expand:
        return
    cpu_triton_utils._expand_kernel_impl = expand
    if KERNEL in dispatcher._registry:
        dispatcher.register_kernels({KERNEL: expand})


def expand(
    output: torch.Tensor,
    values: torch.Tensor,
    ends: torch.Tensor,
    replace_from: float,
    replace_to: float,
    _most: Any = None,
) -> None:
    """Fill ``output`` [rows] with each request's value, once for each of its rows.

    Args:
        values: [requests], of the dtype of ``output``; ``replace_to`` takes the place of ``replace_from``.
        ends: [requests], the number of rows of each request and all before it.
    """
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    replaced = values.masked_fill(values == replace_from, replace_to)
    output.copy_(replaced.repeat_interleave(counts, output_size=len(output)))
