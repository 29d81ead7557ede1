"""Small work is done here, large work in a thread."""

from __future__ import annotations

import threading

import pytest

from vllm_deepinfer.gateway.offload import OFFLOAD_BYTES, offload


@pytest.mark.parametrize(("size", "here"), [(0, True), (OFFLOAD_BYTES, True), (OFFLOAD_BYTES + 1, False)])
async def test_where_it_runs(size: int, here: bool) -> None:
    thread = await offload(size, threading.get_ident)
    assert (thread == threading.get_ident()) is here


async def test_errors_come_back() -> None:
    for size in (0, OFFLOAD_BYTES + 1):
        with pytest.raises(ZeroDivisionError):
            await offload(size, divmod, 1, 0)
