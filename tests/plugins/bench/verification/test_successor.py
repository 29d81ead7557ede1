"""The checkpoint that writes the next id, in the plain form."""

from __future__ import annotations

from pathlib import Path

import torch
from vllm_deepinfer_plugins.bench.verification.successor import FIRST, successor, write_successor
from vllm_deepinfer_plugins.model.weights import load_backbone

from vllm_deepinfer.checkpoint.options import TinyOptions

VOCAB = 1024


def test_the_likeliest_token_is_the_next_id_and_by_far(tmp_path: Path) -> None:
    path = write_successor(tmp_path / "model", TinyOptions(vocab=VOCAB))
    ids = torch.randint(FIRST, VOCAB, (2, 60), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = load_backbone(path).whole(ids).float()
    assert logits.argmax(-1).tolist() == [[successor(token, VOCAB) for token in row] for row in ids.tolist()]
    first, second = logits.topk(2, -1).values.unbind(-1)
    assert (first - second).min() > 1.0, "no rounding of another batch or kernel can change an answer"


def test_successors_go_round() -> None:
    token, seen = FIRST, set()
    for _ in range(VOCAB - FIRST):
        seen.add(token)
        token = successor(token, VOCAB)
    assert token == FIRST and len(seen) == VOCAB - FIRST
