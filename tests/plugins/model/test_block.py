"""One layer against its definition, written out step by step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm_deepinfer_plugins.model.block import Block
from vllm_deepinfer_plugins.model.mhc import collapse, expand
from vllm_deepinfer_plugins.model.sequence import Sequence, Store
from vllm_deepinfer_plugins.model.tiles import RowTiles

from vllm_deepinfer.checkpoint.config import LayerPlan, TextConfig

from .samples import noise, text_config

TOKENS = 6


class Recorder(Sequence):
    """Takes down what a layer writes and asks, and attends to nothing: the output is the query times two."""

    def __init__(self, config: TextConfig, tiles: RowTiles | None = None, image: torch.Tensor | None = None):
        super().__init__(config, torch.arange(TOKENS), tiles or RowTiles(), image)
        self.log: list[tuple[Any, ...]] = []

    def put(self, store: Store, layer: int, rows: torch.Tensor) -> None:
        self.log.append(("put", store, layer, rows))

    def history(self, store: Store, layer: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.log.append(("history", store, layer, count))
        return noise(TOKENS, count, 64, seed=9), torch.ones(TOKENS, count).bool()

    def put_entries(self, plan: LayerPlan, entries: torch.Tensor) -> None:
        self.log.append(("entries", plan.index, entries))

    def select(self, plan: LayerPlan, queries: torch.Tensor, weights: torch.Tensor) -> None:
        self.log.append(("select", plan.index, queries, weights))

    def attend(self, plan: LayerPlan, queries: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
        self.log.append(("attend", plan.index, sink))
        return queries * 2


def block(layer: int) -> tuple[TextConfig, Block]:
    config = text_config()
    torch.manual_seed(layer)
    module = Block(config, config.schedule()[layer], torch.float32)
    for parameter in (module.hc_attn.base, module.hc_ffn.base, module.attn.attn_sink):
        parameter.data = torch.randn_like(parameter)
    return config, module


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = torch.randint(0, 4096, (TOKENS, 1, 4), generator=torch.Generator().manual_seed(5))
    pre = torch.rand(TOKENS, 4, generator=torch.Generator().manual_seed(2))
    return noise(TOKENS, 4, 64, seed=1), pre, rows


@pytest.mark.parametrize("layer", range(8))
def test_single_pass_hyper_connections(layer: int) -> None:
    """Each sub-layer's ``pre`` collapses the input of the next one; ``post`` and ``comb`` are its own."""
    config, module = block(layer)
    streams, pre, rows = inputs()
    with torch.no_grad():
        found, found_pre = module(streams, pre, Recorder(config), rows)
        if layer == 1:
            assert module.engram is not None
            streams = module.engram(streams, rows[:, 0], None)
        rotations = Recorder(config).rotations(module.plan.ratio)
        attn_pre, post, comb = module.hc_attn(streams)
        x = module.attn_norm(collapse(streams, pre))
        attended = module.attn.output(module.attn.project(x, rotations).query * 2, rotations)
        streams = expand(attended, streams, post, comb)
        ffn_pre, post, comb = module.hc_ffn(streams)
        x = module.ffn_norm(collapse(streams, attn_pre))
        experts, weights = module.ffn.gate(x, None)
        routed = module.ffn.experts(x, experts, weights, RowTiles())
        wanted = expand(routed + module.ffn.shared_experts(x), streams, post, comb)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found_pre, ffn_pre)


@pytest.mark.parametrize(
    ("layer", "steps"),
    [
        (0, ["put window", "attend"]),
        (2, ["put window", "put pool", "history pool 2", "entries", "select", "attend"]),
        (3, ["put window", "attend"]),
        (4, ["put window", "entries", "select", "attend"]),
        (6, ["put window", "select", "attend"]),
    ],
)
def test_what_a_layer_writes_and_asks(layer: int, steps: list[str]) -> None:
    config, module = block(layer)
    sequence = Recorder(config)
    with torch.no_grad():
        module(*inputs()[:2], sequence, inputs()[2])
    found = []
    for step in sequence.log:
        store = f" {step[1].value}" if isinstance(step[1], Store) else ""
        found.append(step[0] + store + (f" {step[3]}" if step[0] == "history" else ""))
    assert found == steps
    shapes = {step[0]: [tuple(t.shape) for t in step if isinstance(t, torch.Tensor)] for step in sequence.log}
    if "entries" in steps:
        assert shapes["entries"] == [(TOKENS, 64)]
    if "select" in steps:
        assert shapes["select"] == [(TOKENS, 4, 32), (TOKENS, 4)]


@pytest.mark.parametrize("layer", [1, 2, 4])
def test_tiles_give_the_same_values(layer: int) -> None:
    config, module = block(layer)
    image = torch.tensor([False, True, False, False, True, False])
    streams, pre, rows = inputs()
    with torch.no_grad():
        whole, whole_pre = module(streams, pre, Recorder(config, image=image), rows)
        tiled, tiled_pre = module(streams, pre, Recorder(config, RowTiles(4), image), rows)
    torch.testing.assert_close(tiled, whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(tiled_pre, whole_pre)


def test_image_positions_reach_engram_and_router() -> None:
    config, module = block(1)
    assert module.engram is not None
    module.ffn.gate.bias_vl.data[3] = 100
    streams, pre, rows = inputs()
    image = torch.tensor([False, True] * 3)
    with torch.no_grad():
        text, _ = module(streams, pre, Recorder(config), rows)
        mixed, _ = module(streams, pre, Recorder(config, image=image), rows)
        module.engram = None
        without, _ = module(streams, pre, Recorder(config, image=image), None)
    torch.testing.assert_close(text[::2], mixed[::2], rtol=1e-5, atol=1e-5)
    assert not torch.isclose(text[1::2], mixed[1::2]).all(dim=-1).any()
    # Nothing is added at image positions.
    torch.testing.assert_close(mixed[1::2], without[1::2], rtol=1e-5, atol=1e-5)
