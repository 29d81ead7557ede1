"""Makes vLLM 0.32's own CPU class for DeepSeek-V4 run, in the benchmark's own process only.

The class is complete but for its metadata (`vllm/models/deepseek_v4/cpu`):

- `build_tile_scheduler` returns three of the five keys that its caller reads: KeyError 'c1a' at the first
  decode;
- Triton kernels without a CPU form build the metadata, so each launch fails.

`apply` registers the forms of `v4_metadata` through vLLM's own registry for platform kernels, as
`CpuPlatform.register_triton_kernel_overrides` does for the kernels that it covers. Two places have no such
seam and are set on vLLM's classes. No file is edited, and nothing happens before `apply` is called.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import v4_metadata as metadata

_MLA = "vllm.v1.attention.backends.mla"


def runs_here() -> bool:
    """Whether vLLM's class has its kernels: its build for x86 without AVX-512 leaves them out."""
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    return hasattr(torch.ops._C, "convert_weight_packed")


def apply() -> None:
    """Repair this process, before its engine is made. Idempotent.

    Raises:
        RuntimeError: The class cannot run on this CPU.
    """
    if not runs_here():
        raise RuntimeError("vLLM's DeepSeek-V4 class needs a CPU with AVX-512: measure on another machine")
    from vllm.models.deepseek_v4.cpu.cpu_mla import DeepseekV4CPUSparseSWAMetadataBuilder
    from vllm.triton_utils.dispatcher import register_kernels
    from vllm.v1.attention.backends.mla.sparse_swa import ComputeSWAIndicesAndLensKernel

    if ComputeSWAIndicesAndLensKernel.__call__ is _no_window_slots:
        return
    register_kernels(
        {
            "vllm.v1.attention.ops.metadata._token_request_mapping_kernel": _requests_of_tokens,
            f"{_MLA}.sparse_swa.ComputePrefillMetadataKernel.kernel": _gather_lens,
            f"{_MLA}.compressor_utils.CompressedSlotMappingKernel.kernel": _compressed_slots,
            f"{_MLA}.indexer.BuildPrefillChunkMetadataKernel.kernel": _prefill_rows,
        }
    )
    ComputeSWAIndicesAndLensKernel.__call__ = _no_window_slots
    DeepseekV4CPUSparseSWAMetadataBuilder.build_tile_scheduler = _no_tile_scheduler
    # Without tile permission a process whose first forward pass is tiny dies with SIGILL.
    torch.cpu._init_amx()


def _no_tile_scheduler(self: Any, num_decode_tokens: int) -> dict[str, None]:
    """The plan of a CUDA kernel: CPU has none, for all five layer types."""
    return dict.fromkeys(("swaonly", "c4a", "c128a", "c1a", "c2a"))


def _no_window_slots(self: Any, *inputs: Any, **launch: Any) -> None:
    """The window's slots per token, for CUDA's kernels: the CPU class finds them itself and reads none.

    vLLM's CPU builder leaves out the slots of ratio-128 layers for the same reason. Computed all the same,
    they took 2.5 % of a decode step: a price that the class we are measured against should not pay.
    """


# The registry calls an override with the kernel's parameters in the kernel's order. Those named `_…` are
# strides, block sizes of the launch and settings of context parallelism, which the CPU refuses.
def _requests_of_tokens(
    query_start_loc: Tensor, out: Tensor, _requests: int, mapped: int, total: int, **_launch: Any
) -> None:
    metadata.requests_of_tokens(query_start_loc.numpy(), out.numpy(), mapped, total)


def _gather_lens(
    out: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    replay_start: Tensor,
    _prefills: int,
    decodes: int,
    window: int,
    _block: int,
) -> None:
    metadata.gather_lens(
        out.numpy(), seq_lens.numpy(), query_start_loc.numpy(), replay_start.numpy(), decodes, window
    )


def _compressed_slots(
    out: Tensor,
    slot_mapping: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    _stride: int,
    block_size: int,
    _dcp_world: int,
    _interleave: int,
    ratio: int,
    _pad: int,
    _block: int,
) -> None:
    metadata.compressed_slots(
        out.numpy(),
        slot_mapping.numpy(),
        query_start_loc.numpy(),
        seq_lens.numpy(),
        block_table.numpy(),
        block_size,
        ratio,
    )


def _prefill_rows(
    query_start_loc: Tensor,
    seq_lens: Tensor,
    cu_entries: Tensor,
    row_start: Tensor,
    token_to_request: Tensor,
    starts: Tensor,
    ends: Tensor,
    first: int,
    stop: int,
    _rank: int,
    _world: int,
    _interleave: int,
    _block: int,
    ratio: int,
) -> None:
    metadata.prefill_rows(
        query_start_loc.numpy(),
        seq_lens.numpy(),
        cu_entries.numpy(),
        row_start.numpy(),
        token_to_request.numpy(),
        starts.numpy(),
        ends.numpy(),
        first,
        stop,
        ratio,
    )
