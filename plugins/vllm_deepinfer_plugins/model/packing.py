"""Weights packed for a CPU's bfloat16 products: a product of a few rows costs a fifth of `F.linear`'s.

`F.linear` looks for a kernel and reorders the weight each time: with AMX, weight 512 × 512, one thread and
one row, 61 µs against 14 packed. The packed form is that of our own kernels; a weight whose sides are no
multiples of 32 goes to oneDNN through vLLM, and so do all of them where the kernels cannot be compiled. Where
oneDNN has no such product (x86 without AVX-512), what the kernels do not take stays with `F.linear`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import nn

from ..kernels import Kernels
from ..kernels.prepare import has_onednn_products
from .layers import GroupedLinear, Linear, Product
from .moe import MoE, RoutedExperts


def pack(model: nn.Module, kernels: Kernels | None) -> None:
    """Give every `Linear`, `GroupedLinear` and `MoE` a packed product, and free the weights that it replaces.

    Args:
        model: On a CPU; weights of other dtypes than bfloat16 stay as they are.
        kernels: The compiled kernels, or None for oneDNN's products alone.
    """
    arena = Arena()
    for module in list(model.modules()):
        if isinstance(module, MoE) and kernels is not None and _pack_experts(module, kernels, arena):
            continue
        if isinstance(module, Linear):
            _pack_linear(module, kernels, arena)
        elif isinstance(module, GroupedLinear) and kernels is not None:
            weight = module.weight.data
            if weight.shape[0] // module.groups % 32 == 0 and weight.shape[1] % 32 == 0:
                module.packed = _native(weight, kernels, arena, groups=module.groups)
                module.weight.data = weight.new_empty(0)
        elif isinstance(module, RoutedExperts) and module.gate_up.numel() and has_onednn_products():
            pairs = zip(module.gate_up.data, module.down.data, strict=True)
            module.packed = [(_product(gate_up), _product(down)) for gate_up, down in pairs]
            module.gate_up.data = module.gate_up.new_empty(0)
            module.down.data = module.down.new_empty(0)


def _pack_linear(module: Linear, kernels: Kernels | None, arena: Arena) -> None:
    weight = module.weight.data
    if not weight.numel():
        return
    narrow = weight.to(torch.bfloat16)
    if kernels is not None and kernels.packs(weight) and torch.equal(narrow.to(weight.dtype), weight):
        # A float32 projection whose weight bfloat16 holds exactly, as a released one does: in a bfloat16
        # model its input is bfloat16 too, so the same products are summed in float32 from half the bytes.
        module.packed = _native(narrow, kernels, arena, wide=weight.dtype == torch.float32)
    elif weight.dtype == torch.bfloat16 and has_onednn_products():
        module.packed = _product(weight)
    else:
        return
    module.weight.data = weight.new_empty(0)


def _native(
    weight: torch.Tensor, kernels: Kernels, arena: Arena, *, groups: int = 1, wide: bool = False
) -> Product:
    packed = arena.keep(kernels.pack(weight))

    def product(rows: torch.Tensor) -> torch.Tensor:
        return kernels.linear(rows.to(torch.bfloat16), packed, groups=groups, wide=wide)

    return product


def _pack_experts(module: MoE, kernels: Kernels, arena: Arena) -> bool:
    """Routed experts and the shared one, as the last expert that every row visits with weight 1."""
    routed, shared = module.experts, module.shared_experts
    if not (kernels.packs(routed.gate_up.data) and kernels.packs(routed.down.data)):
        return False
    both = torch.cat((shared.w1.weight.data, shared.w3.weight.data))
    if both.shape != routed.gate_up.shape[1:] or both.dtype != torch.bfloat16:
        return False
    gate_up = arena.keep(kernels.pack(torch.cat((routed.gate_up.data, both.unsqueeze(0)))))
    down = arena.keep(kernels.pack(torch.cat((routed.down.data, shared.w2.weight.data.unsqueeze(0)))))
    module.packed = _all_experts(kernels, gate_up, down, routed.experts, routed.limit)
    for parameter in (routed.gate_up, routed.down, shared.w1.weight, shared.w2.weight, shared.w3.weight):
        parameter.data = parameter.new_empty(0)
    return True


def _all_experts(
    kernels: Kernels, gate_up: torch.Tensor, down: torch.Tensor, shared: int, limit: float
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    def experts(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        ids = nn.functional.pad(ids, (0, 1), value=shared)
        weights = nn.functional.pad(weights, (0, 1), value=1.0)
        return kernels.experts(x, ids, weights, gate_up, down, limit)

    return experts


class Arena:
    """Memory for packed weights that the system may back with huge pages.

    A decode step reads every weight once; with small pages a fifth of an expert layer's time went into
    address translation. Weights lie one behind the other in pieces of 64 MiB, or of their own size if larger.
    """

    _PIECE = 1 << 26
    _MADV_HUGEPAGE = 14
    _HUGE_PAGE = 1 << 21

    def __init__(self) -> None:
        self._space = torch.empty(0, dtype=torch.uint8)

    def keep(self, packed: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor, aligned to 64 bytes."""
        size = -(-packed.nbytes // 64) * 64
        if size > len(self._space):
            self._space = self._allocate(max(size, self._PIECE))
        part, self._space = self._space[: packed.nbytes], self._space[size:]
        return part.view(packed.dtype).view(packed.shape).copy_(packed)

    def _allocate(self, size: int) -> torch.Tensor:
        space = torch.empty(size + self._HUGE_PAGE, dtype=torch.uint8)
        space = space[-space.data_ptr() % self._HUGE_PAGE :]
        whole = len(space) // self._HUGE_PAGE * self._HUGE_PAGE
        # Advice only: where it is not taken, nothing is lost.
        address, length = ctypes.c_void_p(space.data_ptr()), ctypes.c_size_t(whole)
        ctypes.CDLL(None).madvise(address, length, self._MADV_HUGEPAGE)
        return space


def _product(weight: torch.Tensor) -> Product:
    """Rows times the transpose of a weight [outputs, inputs], by oneDNN."""
    from vllm import _custom_ops

    handler = _custom_ops.create_onednn_mm(weight.t(), 32)
    return lambda rows: _custom_ops.onednn_mm(handler, rows, None)
