from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from vllm_deepinfer_plugins.train.optimizer import Optimizer, Rates
from vllm_deepinfer_plugins.train.state import Saved, read_header, restore, save

from vllm_deepinfer.checkpoint.errors import CheckpointError

SAVED = Saved(7, {"seed": 1, "lengths": [[0.0, 512]]}, [{"step": 7, "bits": 2.5}], 12.5)


def model(size: int = 4) -> nn.Linear:
    layer = nn.Linear(size, 3)
    with torch.no_grad():
        layer.weight.copy_(torch.arange(3.0 * size).view(3, size))
    return layer


def optimizer(layer: nn.Linear) -> Optimizer:
    made = Optimizer(layer.named_parameters(), 2, Rates())
    layer.weight.grad, layer.bias.grad = torch.ones_like(layer.weight), torch.ones_like(layer.bias)
    made.step(1.0)
    return made


def test_everything_comes_back(tmp_path: Path) -> None:
    first = model()
    before = optimizer(first)
    save(tmp_path / "a.safetensors", first, before, SAVED)
    second = nn.Linear(4, 3)
    after = Optimizer(second.named_parameters(), 2, Rates())
    assert restore(tmp_path / "a.safetensors", second, after, SAVED.settings) == SAVED
    assert torch.equal(first.weight, second.weight) and torch.equal(first.bias, second.bias)
    assert after.steps == 1 and before.state.keys() == after.state.keys()
    assert all(torch.equal(value, after.state[name]) for name, value in before.state.items())
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


def test_another_model_another_training_and_no_state_are_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    save(file, model(), optimizer(model()), SAVED)
    with pytest.raises(CheckpointError, match=r"another model \(model.weight differs\): name another folder"):
        restore(file, model(5))
    with pytest.raises(CheckpointError, match="begun with other settings"):
        restore(file, model(), None, {"seed": 2})
    save_file({"a": torch.zeros(1)}, tmp_path / "b.safetensors")
    (tmp_path / "c.safetensors").write_bytes(b"nothing")
    for name in ("b.safetensors", "c.safetensors", "d.safetensors"):
        with pytest.raises(CheckpointError, match=r"is no state of a training .* or delete the file"):
            read_header(tmp_path / name)


WRITER = """
import sys
from pathlib import Path
from torch import nn
from vllm_deepinfer_plugins.train.optimizer import Optimizer, Rates
from vllm_deepinfer_plugins.train.state import Saved, save
layer = nn.Linear(1000, 300)
optimizer = Optimizer(layer.named_parameters(), 2, Rates())
for step in range(10**6):
    nn.init.constant_(layer.weight, step)
    save(Path(sys.argv[1]), layer, optimizer, Saved(step, {}, [], 0.0))
    print(step, flush=True)
"""


def test_killed_at_any_moment_the_last_state_is_whole(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    for lines in (2, 5):
        command = [sys.executable, "-c", WRITER, str(file)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            written = [int(process.stdout.readline()) for _ in range(lines)]
            os.kill(process.pid, signal.SIGKILL)
        layer = nn.Linear(1000, 300)
        saved = restore(file, layer)
        assert saved.step >= written[-1]
        assert bool((layer.weight == saved.step).all()), "weights and counter are of one state"
