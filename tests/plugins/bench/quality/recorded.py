"""What the committed weights are worth on a few held-out documents.

`python -m tests.plugins.bench.quality.recorded` writes it down after a training; a test measures it again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import log
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy
from vllm_deepinfer_plugins.bench.quality.drafts import drafts_of
from vllm_deepinfer_plugins.bench.quality.texts import Text, heldout
from vllm_deepinfer_plugins.draft.load import load_drafter
from vllm_deepinfer_plugins.model.backbone import Backbone
from vllm_deepinfer_plugins.model.weights import load_backbone

from vllm_deepinfer.checkpoint.trained import trained_folder
from vllm_deepinfer.lessons.encoder import Encoder

FILE = Path(__file__).parent / "data" / "recorded.json"
TOKENS: Mapping[str, int] = {"code": 250, "tools": 250, "json": 150, "arithmetic": 100, "chat": 100}


@torch.no_grad()
def measure(folder: Path) -> dict[str, float]:
    """Bits per token that counts, the share of these that are the likeliest, by kind; drafts of JSON."""
    encoder = Encoder(Tokenizer.from_file(str(folder / "tokenizer.json")))
    model = load_backbone(folder)
    found: dict[str, float] = {}
    for kind, tokens in TOKENS.items():
        some = heldout(encoder, kind, tokens)  # type: ignore[arg-type]
        bits, hits = zip(*(counted(model, text) for text in some), strict=True)
        found[f"bits_{kind}"] = float(torch.cat(bits).mean())
        found[f"likeliest_{kind}"] = float(torch.cat(hits).float().mean())
        if kind == "json":
            found["accepted_length_json"] = drafts_of(load_drafter(folder), model, some).accepted_length
    return {name: round(value, 4) for name, value in found.items()}


def counted(model: Backbone, text: Text) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the tokens that count: bits, and whether each is the likeliest."""
    ids, learnt = torch.tensor(text.ids), torch.tensor(text.learnt[1:])
    logits = model.whole(ids.unsqueeze(0))[0, :-1]
    bits = cross_entropy(logits, ids[1:], reduction="none") / log(2)
    return bits[learnt], (logits.argmax(-1) == ids[1:])[learnt]


if __name__ == "__main__":
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(json.dumps(measure(trained_folder()), indent=2) + "\n", encoding="utf-8")
    print(FILE.read_text(encoding="utf-8"))
