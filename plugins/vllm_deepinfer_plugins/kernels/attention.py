"""The kernels that follow block tables: attention and selection over paged keys."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from .structures import Filter, Paged, filter_argument


class AttentionKernels:
    """Functions of a loaded library; `library.Kernels` inherits them."""

    functions: Any

    def attend_rows(
        self,
        query: torch.Tensor,
        positions: torch.Tensor,
        requests: torch.Tensor,
        window: Paged,
        reach: int,
        entries: Paged | None,
        chosen: torch.Tensor | None,
        sink: torch.Tensor,
        floors: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of single rows of many requests.

        Args:
            query: [tokens, heads, size].
            positions, requests: [tokens] int64.
            reach: Window keys of a row, itself among them.
            chosen: [tokens, k] int64 entry numbers, −1 for none; None without entries.
            floors: [tokens] int64, the first position whose window key a row may see; None for all.
        """
        assert positions.is_contiguous() and requests.is_contiguous()
        assert floors is None or floors.is_contiguous()
        query, out = query.contiguous(), torch.empty(query.shape, dtype=query.dtype)
        chosen = None if chosen is None else chosen.contiguous()
        self.checked(
            self.functions.attend_rows(
                query.data_ptr(),
                *query.shape,
                positions.data_ptr(),
                requests.data_ptr(),
                None if floors is None else floors.data_ptr(),
                ctypes.byref(window.structure),
                reach,
                None if entries is None else ctypes.byref(entries.structure),
                None if chosen is None else chosen.data_ptr(),
                0 if chosen is None else chosen.shape[1],
                sink.data_ptr(),
                query.shape[-1] ** -0.5,
                out.data_ptr(),
            )
        )
        return out

    def attend_span(
        self,
        query: torch.Tensor,
        begin: int,
        request: int,
        window: Paged,
        reach: int,
        entries: Paged | None,
        chosen: torch.Tensor | None,
        sink: torch.Tensor,
        floor: int = 0,
    ) -> torch.Tensor:
        """As `attend_rows`, for a prompt chunk: rows at ``begin`` and following of one request."""
        query, out = query.contiguous(), torch.empty(query.shape, dtype=query.dtype)
        chosen = None if chosen is None else chosen.contiguous()
        self.checked(
            self.functions.attend_span(
                query.data_ptr(),
                *query.shape,
                begin,
                request,
                floor,
                ctypes.byref(window.structure),
                reach,
                None if entries is None else ctypes.byref(entries.structure),
                None if chosen is None else chosen.data_ptr(),
                0 if chosen is None else chosen.shape[1],
                sink.data_ptr(),
                query.shape[-1] ** -0.5,
                out.data_ptr(),
            )
        )
        return out

    def select_rows(
        self,
        query: torch.Tensor,
        weights: torch.Tensor,
        requests: torch.Tensor,
        visible: torch.Tensor,
        entries: Paged,
        offset: int,
        candidates: Filter | None,
        k: int,
    ) -> torch.Tensor:
        """The k best entries [tokens, k] of single rows, increasing, then −1; of equal ones the lower.

        Args:
            query: [tokens, heads, size].
            weights: [tokens, heads] float32.
            visible: [tokens] int64, entries that a row may see.
            offset: Where an entry's index key begins.
        """
        assert requests.is_contiguous() and visible.is_contiguous()
        query, weights = query.contiguous(), weights.contiguous()
        chosen = visible.new_empty(len(query), k)
        self.checked(
            self.functions.select_rows(
                query.data_ptr(),
                weights.data_ptr(),
                *query.shape,
                requests.data_ptr(),
                visible.data_ptr(),
                ctypes.byref(entries.structure),
                offset,
                filter_argument(candidates),
                k,
                chosen.data_ptr(),
            )
        )
        return chosen

    def select_span(
        self,
        query: torch.Tensor,
        weights: torch.Tensor,
        begin: int,
        request: int,
        entries: Paged,
        offset: int,
        candidates: Filter | None,
        k: int,
    ) -> torch.Tensor:
        """As `select_rows`, for a prompt chunk of one request at ``begin`` and following."""
        query, weights = query.contiguous(), weights.contiguous()
        chosen = torch.empty(len(query), k, dtype=torch.int64)
        self.checked(
            self.functions.select_span(
                query.data_ptr(),
                weights.data_ptr(),
                *query.shape,
                begin,
                request,
                ctypes.byref(entries.structure),
                offset,
                filter_argument(candidates),
                k,
                chosen.data_ptr(),
            )
        )
        return chosen

    @staticmethod
    def checked(code: int) -> None:
        if code:
            raise MemoryError(
                "a kernel found no memory to work in: lower max_num_batched_tokens or max_model_len"
            )
