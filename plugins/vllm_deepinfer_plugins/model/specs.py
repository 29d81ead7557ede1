"""What vLLM's block manager is told about window KV that leaves the prefix cache.

vLLM 0.32 rebuilds sliding windows after a prefix hit where a group's spec says so: its scheduler rewinds a
hit by `prefix_replay_tokens`, and groups that are not `prefix_cacheable` are neither hashed nor looked up.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm.v1.kv_cache_interface import SlidingWindowMLASpec


@dataclass(frozen=True, kw_only=True)
class ReplayedWindowSpec(SlidingWindowMLASpec):
    """Window KV that is rebuilt after a hit, ``sliding_window`` − 1 tokens of it.

    One token more than the model reads is kept: a hit of H tokens is replayed from H − W, which the next
    token's window does not reach, so that vLLM would retire its block where (W − 1) is a multiple of the
    block size (bug class 16).
    """

    bounded_replay: bool = True

    @property
    def prefix_replay_tokens(self) -> int:
        return self.sliding_window - 1


@dataclass(frozen=True, kw_only=True)
class ScratchSpec(SlidingWindowMLASpec):
    """Rows of an unfinished group: hits end where groups end, so nobody reads them behind a hit."""

    @property
    def prefix_cacheable(self) -> bool:
        return False
