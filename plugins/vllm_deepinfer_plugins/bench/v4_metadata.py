"""What the Triton kernels that build DeepSeek-V4's attention metadata compute, in NumPy.

vLLM 0.32's CPU class for DeepSeek-V4 runs attention in C++ but builds its metadata with Triton, for which
PyPI has no CPU back-end. Each function does what one kernel does, on whole arrays, writing into the arrays
that it is given. NumPy and not torch: a decode step has a handful of tokens, where the fixed price of a call
decides. The same functions in torch took 0.85 ms of a 13.6 ms step at batch 1. Sources in vLLM 0.32.0:
`vllm/v1/attention/ops/metadata.py` and
`vllm/v1/attention/backends/mla/{sparse_swa,compressor_utils,indexer}.py`.

R requests share a step; request r owns the tokens `query_start_loc[r]` … `query_start_loc[r + 1]` of it
(int32 [R + 1]) and has `seq_lens[r]` tokens at its end (int32 [R]).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.integer]

PAD = -1


def requests_of_tokens(query_start_loc: Ints, out: Ints, mapped: int, total: int) -> None:
    """Write the request of each of the first `mapped` tokens into `out`, then 0 up to `total`."""
    out[:mapped] = _owners(query_start_loc, 0, mapped)
    out[mapped:total] = 0


def gather_lens(
    out: Ints, seq_lens: Ints, query_start_loc: Ints, replay_start: Ints, first: int, window: int
) -> None:
    """Window positions that each prefill request reads: its new tokens and at most `window - 1` before them.

    `out` is int32 [P] for the P requests from request `first` on; positions below `replay_start` (int32 [≥
    R]) hold no window KV.
    """
    last = first + out.shape[0]
    new = np.diff(query_start_loc[first : last + 1])
    before = seq_lens[first:last] - new - replay_start[first:last]
    out[:] = new + np.clip(before, 0, window - 1)


def compressed_slots(
    out: Ints,
    slot_mapping: Ints,
    query_start_loc: Ints,
    seq_lens: Ints,
    block_table: Ints,
    block_size: int,
    ratio: int,
) -> None:
    """Cache slot of the compressed entry that each token completes, -1 where it completes none.

    Each `ratio` tokens share an entry, which the last of them writes; a token whose own slot in
    `slot_mapping` is -1 writes none. `block_size` counts entries, `block_table` is int32 [R, blocks]. Tokens
    past those of the last request keep what `out` (int64 [T]) holds.
    """
    requests = block_table.shape[0]
    tokens = min(int(query_start_loc[requests]), out.shape[0])
    owner = _owners(query_start_loc[: requests + 1], 0, tokens)
    position = _positions(query_start_loc, seq_lens, owner, 0, tokens)
    writes = ((position + 1) % ratio == 0) & (slot_mapping[:tokens] != PAD)
    out[:tokens] = PAD
    entry = position[writes] // ratio
    block = block_table[owner[writes], entry // block_size].astype(np.int64)
    out[:tokens][writes] = block * block_size + entry % block_size


def prefill_rows(
    query_start_loc: Ints,
    seq_lens: Ints,
    cu_entries: Ints,
    row_start: Ints,
    token_to_request: Ints,
    starts: Ints,
    ends: Ints,
    first: int,
    stop: int,
    ratio: int,
) -> None:
    """Which compressed keys each of the query tokens `first` … `stop` of a prefill chunk may score.

    The chunk's keys lie end to end, those of request r from `cu_entries[r]` on (int32 [R + 1]);
    `token_to_request` (int32 [keys]) receives the request of each. `starts` and `ends` (int32 [stop - first])
    receive the causal range of each query, counted from `row_start[r]` (int32 [≥ R]).
    """
    owner = _owners(query_start_loc, first, stop)
    starts[:] = row_start[owner]
    ends[:] = starts + (_positions(query_start_loc, seq_lens, owner, first, stop) + 1) // ratio
    token_to_request[:] = _owners(cu_entries, 0, token_to_request.shape[0])


def _owners(cumulative: Ints, first: int, stop: int) -> Ints:
    """Request of each of the tokens `first` … `stop`, int64; past the end, the last request."""
    owner = np.searchsorted(cumulative[1:], np.arange(first, stop, dtype=cumulative.dtype), side="right")
    return np.minimum(owner, cumulative.shape[0] - 2)


def _positions(query_start_loc: Ints, seq_lens: Ints, owner: Ints, first: int, stop: int) -> Ints:
    """Position in its sequence of each of the tokens `first` … `stop`, int64."""
    ahead = seq_lens - query_start_loc[1 : seq_lens.shape[0] + 1]
    return np.arange(first, stop) + ahead[owner]
