"""Random weights under which the next token depends on the whole context, measured with the model itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vllm_deepinfer.checkpoint.options import TinyOptions
from vllm_deepinfer.checkpoint.tiny import write_checkpoint

torch = pytest.importorskip("torch")
loading = pytest.importorskip("vllm_deepinfer_plugins.model.weights")

pytestmark = pytest.mark.slow

LENGTH, TRIES = 200, 2
DISTANCES = (1, 2, 3, 15, 16, 17, 40, 120, 199)  # the window has 16 tokens, an n-gram 4


def load(folder: Path, **changes: Any) -> Any:
    write_checkpoint(folder, TinyOptions(**changes))
    return loading.load_backbone(folder).eval()


@torch.no_grad()
def divergences(model: Any) -> dict[int, float]:
    """KL in nats of the last token's distribution when one token that far before it is another."""
    generator = torch.Generator().manual_seed(0)
    vocab = model.config.vocab_size
    ids = torch.randint(25, vocab, (LENGTH,), generator=generator).repeat(1 + TRIES * len(DISTANCES), 1)
    changed = torch.arange(len(ids) - 1)
    places = LENGTH - 1 - torch.tensor(DISTANCES).repeat_interleave(TRIES)
    ids[1 + changed, places] = torch.randint(25, vocab, (len(changed),), generator=generator)
    last = torch.log_softmax(model.whole(ids)[:, -1].double(), dim=-1)
    kl = (last[0].exp() * (last[0] - last[1:])).sum(-1).unflatten(0, (len(DISTANCES), TRIES)).mean(-1)
    return dict(zip(DISTANCES, kl.tolist(), strict=True))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"encoding": "released", "seed": 1},
        {"ratios": (1, 2, 2, 0, 2, 1), "window": 8},
        {"hidden": 128, "heads": 8, "head_dim": 64, "layers": 4, "experts": 16, "top_k": 4},
    ],
    ids=["default", "released", "schedule", "sizes"],
)
def test_a_token_matters_however_far_back(tmp_path: Path, changes: dict[str, Any]) -> None:
    model = load(tmp_path / "model", **changes)
    assert min(divergences(model).values()) > 1e-3


@torch.no_grad()
def test_dummy_weights_would_fail(tmp_path: Path) -> None:
    """vLLM's dummy weights are uniform within 1e-3: the measure above tells them apart."""
    model = load(tmp_path / "model")
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.uniform_(-1e-3, 1e-3, generator=generator)
    assert max(divergences(model).values()) < 1e-6


@torch.no_grad()
def test_greedy_decoding_does_not_fall_into_a_cycle(tmp_path: Path) -> None:
    model = load(tmp_path / "model")
    ids = torch.randint(25, 1024, (1, 20), generator=torch.Generator().manual_seed(0))
    for _ in range(30):
        ids = torch.cat((ids, model.whole(ids)[:, -1:].argmax(-1)), dim=1)
    assert len(set(ids[0, 20:].tolist())) > 20


@torch.no_grad()
def test_the_released_encoding_is_close_to_the_values_that_it_encodes(tmp_path: Path) -> None:
    exact, encoded = load(tmp_path / "exact"), load(tmp_path / "encoded", encoding="released")
    ids = torch.randint(25, 1024, (1, 100), generator=torch.Generator().manual_seed(0))
    first, second = exact.whole(ids)[0], encoded.whole(ids)[0]
    correlation = torch.corrcoef(torch.stack((first.flatten(), second.flatten())))[0, 1]
    assert 0.5 < float(correlation) < 0.999
