"""The compiled kernels as functions of tensors, and the switch that turns them on in a process.

They take bfloat16 on a CPU without gradients; everything else stays with PyTorch. Sums run in float32 in
one order per row, so a row's result does not depend on its neighbours (`attend_span` apart, where the chunk
decides which keys share a rounding); PyTorch's differs in the last bits.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import torch

from .attention import AttentionKernels
from .build import build

BLOCK = 32
"""Outputs of a packed weight's block, and the multiple that inputs and outputs must have."""
FORMATS = {None: 0, "fp8": 1, "nvfp4": 2, "mxfp4": 3}

_TYPES = {"p": ctypes.c_void_p, "l": ctypes.c_long, "i": ctypes.c_int, "f": ctypes.c_float}
_SIGNATURES = {
    "linear": "pllllplpi",
    "experts": "pllpplppllfp",
    "enter": "pplilpppfipfpppp",
    "expand": "pppplilp",
    "rows": "pllilpfpiiipl",
    "pool": "plilp",
    "route": "pllppliifpp",
    "engram": "pppplilfp",
    "attend_rows": "plilpppplpplpfp",
    "attend_span": "plillllplpplpfp",
    "select_rows": "pplilppplplp",
    "select_span": "pplilllplplp",
}


class Kernels(AttentionKernels):
    """The functions of one compiled library.

    Args:
        path: From `build.build`.

    Raises:
        OSError: The library does not load: another processor's, or no OpenMP runtime in the process.
    """

    def __init__(self, path: Path) -> None:
        self.functions = SimpleNamespace()
        library = ctypes.CDLL(str(path), mode=os.RTLD_NOW)
        if library.deepinfer_prepare():
            raise OSError("the operating system does not grant this processor's tile registers")
        for name, letters in _SIGNATURES.items():
            function = getattr(library, f"deepinfer_{name}")
            function.argtypes, function.restype = [_TYPES[letter] for letter in letters], ctypes.c_int
            setattr(self.functions, name, function)

    @staticmethod
    def packs(weight: torch.Tensor) -> bool:
        """Whether a weight [..., outputs, inputs] has a packed form: both must be multiples of `BLOCK`."""
        return weight.shape[-1] % BLOCK == 0 and weight.shape[-2] % BLOCK == 0

    @staticmethod
    def pack(weight: torch.Tensor) -> torch.Tensor:
        """[..., outputs, inputs] bfloat16 to [..., outputs / 32, inputs / 2, 32, 2]."""
        blocks = weight.unflatten(-1, (-1, 2)).unflatten(-3, (-1, BLOCK))
        return blocks.transpose(-3, -2).contiguous()

    def linear(
        self, x: torch.Tensor, packed: torch.Tensor, *, groups: int = 1, wide: bool = False
    ) -> torch.Tensor:
        """Rows [..., groups × inputs] times a packed weight: [..., outputs], bfloat16 or float32 if ``wide``.

        With several groups the weight is block-diagonal: a share of the outputs sees a group of the inputs.
        """
        inputs, outputs = packed.shape[1] * 2, packed.shape[0] * BLOCK
        assert packed.shape[0] % groups == 0 and x.dtype == torch.bfloat16
        rows = x.reshape(-1, groups * inputs)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        out = x.new_empty(len(rows), outputs, dtype=torch.float32 if wide else torch.bfloat16)
        self.functions.linear(
            rows.data_ptr(),
            rows.stride(0),
            len(rows),
            inputs,
            groups,
            packed.data_ptr(),
            outputs,
            out.data_ptr(),
            wide,
        )
        return out.view(*x.shape[:-1], outputs)

    def experts(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        limit: float,
    ) -> torch.Tensor:
        """Routed experts of rows [tokens, hidden].

        Args:
            ids: [tokens, chosen] int64.
            weights: [tokens, chosen] float32.
            gate_up, down: Packed, with an axis of experts in front.
            limit: Where SwiGLU clamps, 0 for nowhere.
        """
        x, ids, weights = x.contiguous(), ids.contiguous(), weights.contiguous()
        out, width = torch.empty_like(x), down.shape[2] * 2
        self.checked(
            self.functions.experts(
                x.data_ptr(),
                *x.shape,
                ids.data_ptr(),
                weights.data_ptr(),
                ids.shape[1],
                gate_up.data_ptr(),
                down.data_ptr(),
                len(down),
                width,
                limit,
                out.data_ptr(),
            )
        )
        return out

    def enter(
        self,
        streams: torch.Tensor,
        last: torch.Tensor,
        mix: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        hc_eps: float,
        iterations: int,
        norm: torch.Tensor,
        norm_eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """A sub-layer's normalised input [tokens, hidden] and its mix ``pre``, ``post``, ``comb``.

        Args:
            streams: [tokens, n, hidden].
            last: [tokens, n] float32, the preceding sub-layer's ``pre``.
            mix: ``fn``, ``base`` and ``scale`` of the hyper-connection.
            norm: [hidden], the weight of the norm behind the collapse.
        """
        streams, last = streams.contiguous(), last.contiguous()
        tokens, n, hidden = streams.shape
        x, pre, post = streams.new_empty(tokens, hidden), torch.empty_like(last), torch.empty_like(last)
        comb = last.new_empty(tokens, n, n)
        self.functions.enter(
            streams.data_ptr(),
            last.data_ptr(),
            tokens,
            n,
            hidden,
            *(part.data_ptr() for part in mix),
            hc_eps,
            iterations,
            norm.data_ptr(),
            norm_eps,
            x.data_ptr(),
            pre.data_ptr(),
            post.data_ptr(),
            comb.data_ptr(),
        )
        return x, pre, post, comb

    def expand(
        self, output: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
    ) -> torch.Tensor:
        """The next streams [tokens, n, hidden]; see `model.mhc.expand`."""
        output, streams = output.contiguous(), streams.contiguous()
        post, comb = post.contiguous(), comb.contiguous()
        next_streams = torch.empty_like(streams)
        self.functions.expand(
            output.data_ptr(),
            streams.data_ptr(),
            post.data_ptr(),
            comb.data_ptr(),
            *streams.shape,
            next_streams.data_ptr(),
        )
        return next_streams

    def rows(
        self,
        values: torch.Tensor,
        *,
        norm: torch.Tensor | None = None,
        eps: float = 0.0,
        turns: torch.Tensor | None = None,
        inverse: bool = False,
        fmt: str | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Rows through a norm, a rotation and a cache rounding, each if asked for.

        Args:
            values: [tokens, size] or [tokens, heads, size], bfloat16.
            norm: [size], the norm's weight.
            turns: [tokens, pairs] complex64, for the last 2 × pairs channels.
            inverse: Rotate back.
            fmt: A cache format of `model.quant`.
            out: [tokens, size] with any row stride, or ``values`` itself; new by default.
        """
        values = values.contiguous()
        out = torch.empty_like(values) if out is None else out
        assert norm is None or norm.dtype == torch.bfloat16
        if turns is not None:
            turns = turns.contiguous()
            assert len(turns) == len(values) and 2 * turns.shape[1] <= values.shape[-1]
        heads = values.shape[1] if values.ndim == 3 else 1
        size = values.shape[-1]
        self.functions.rows(
            values.data_ptr(),
            size,
            len(values),
            heads,
            size,
            None if norm is None else norm.data_ptr(),
            eps,
            None if turns is None else turns.data_ptr(),
            0 if turns is None else turns.shape[1],
            inverse,
            FORMATS[fmt],
            out.data_ptr(),
            out.stride(-2),
        )
        return out

    def pool(self, group: torch.Tensor) -> torch.Tensor:
        """Softmax-gated groups [tokens, ratio, 2 × size] float32 to [tokens, size] bfloat16."""
        group = group.contiguous()
        tokens, ratio, channels = group.shape
        out = group.new_empty(tokens, channels // 2, dtype=torch.bfloat16)
        self.functions.pool(group.data_ptr(), tokens, ratio, channels // 2, out.data_ptr())
        return out

    def route(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, chosen: int, scale: float, norm: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Expert ids and weights [tokens, chosen]; see `model.moe.Router`."""
        x = x.contiguous()
        ids = x.new_empty(len(x), chosen, dtype=torch.int64)
        weights = x.new_empty(len(x), chosen, dtype=torch.float32)
        self.functions.route(
            x.data_ptr(),
            *x.shape,
            weight.data_ptr(),
            bias.data_ptr(),
            len(weight),
            chosen,
            norm,
            scale,
            ids.data_ptr(),
            weights.data_ptr(),
        )
        return ids, weights

    def engram(
        self, streams: torch.Tensor, memory: torch.Tensor, query: torch.Tensor, key: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Streams [tokens, n, hidden] with Engram's gated read; see `model.engram.Engram`.

        Args:
            memory: [tokens, (n + 1) × hidden], keys and value.
            query, key: [n, hidden], weights of the two norms.
        """
        streams, memory = streams.contiguous(), memory.contiguous()
        out = torch.empty_like(streams)
        self.functions.engram(
            streams.data_ptr(),
            memory.data_ptr(),
            query.data_ptr(),
            key.data_ptr(),
            *streams.shape,
            eps,
            out.data_ptr(),
        )
        return out


_loaded: Kernels | None = None


def load() -> Kernels:
    """Compile if need be and turn the kernels on in this process.

    Raises:
        BuildError: They cannot be compiled.
        OSError: They do not load.
    """
    global _loaded
    if _loaded is None:
        _loaded = Kernels(build())
    return _loaded


def active(values: torch.Tensor) -> Kernels | None:
    """The kernels if they are on and take these values, else None."""
    if _loaded is None or values.dtype != torch.bfloat16 or values.device.type != "cpu":
        return None
    return None if torch.is_grad_enabled() else _loaded


@contextmanager
def suspended() -> Iterator[None]:
    """PyTorch alone inside the block, to compare the two."""
    global _loaded
    kept, _loaded = _loaded, None
    try:
        yield
    finally:
        _loaded = kept
