"""What is compared: vLLM's own settings, and ours at a target."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fixed:
    """Stock vLLM: max_num_batched_tokens, and long_prefill_token_threshold or 0 for off."""

    chunk: int
    threshold: int = 0

    @property
    def label(self) -> str:
        return f"{self.chunk}/{self.threshold}" if self.threshold else str(self.chunk)


CHUNKS = (128, 256, 512, 1024, 2048, 8192)
THRESHOLDS = (0, 256, 512)


def full_grid() -> list[Fixed]:
    """All chunks with all thresholds that are smaller: a threshold above the chunk does nothing."""
    return [Fixed(c, t) for c in CHUNKS for t in THRESHOLDS if t < c]


def quick_grid() -> list[Fixed]:
    """One setting per factor of two where the targets lie, and the two thresholds of the earlier study."""
    return [Fixed(128), Fixed(256), Fixed(512), Fixed(1024), Fixed(2048), Fixed(1024, 256), Fixed(2048, 512)]
