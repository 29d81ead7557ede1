"""Two processes: the same weights in both, every time, and nearly those of one process."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from vllm_deepinfer_plugins.train import ranks
from vllm_deepinfer_plugins.train.shape import build_backbone

from tests.plugins.train.pair import part, train
from tests.plugins.train.tiny import FIELDS, TOKENIZER, assert_same, weights


def test_alone_there_is_nothing_to_share() -> None:
    rows = torch.arange(6).view(3, 2)
    assert (ranks.rank(), ranks.world()) == (0, 1) and torch.equal(ranks.share(rows), rows)
    value = torch.ones(2)
    ranks.add_up([value])
    assert value.tolist() == [1, 1]


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    found = []
    for attempt in ("a", "b"):
        folder = tmp_path / attempt
        folder.mkdir()
        context = multiprocessing.get_context("spawn")
        processes = [context.Process(target=part, args=(folder, number)) for number in range(2)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
            assert process.exitcode == 0
        found += [load_file(folder / f"{number}.safetensors") for number in range(2)]
        assert [path.name for path in (folder / "state").iterdir()] == ["backbone.safetensors"]
    for other in found[1:]:
        assert_same(found[0], other)
    single = train(tmp_path / "one")
    begun = weights(build_backbone(FIELDS, TOKENIZER, 0))
    moved = sum(float((single[name] - begun[name]).norm()) for name in single)
    apart = sum(float((single[name] - found[0][name]).norm()) for name in single)
    assert apart < 0.35 * moved
