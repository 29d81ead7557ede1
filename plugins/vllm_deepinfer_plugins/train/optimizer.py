"""Muon for matrices and AdamW for the rest, with a state that is a flat list of tensors.

Muon (Jordan et al., 2024) orthogonalises the momentum of a matrix by a few Newton-Schulz steps. Stacked
experts and the groups of the output projection count as matrices of their own. Tables, norms, mixers, routers
and the indexer, whose gradients are sparse, small or of another scale, take AdamW (Loshchilov and Hutter,
2019).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from .ranks import add_up, rank, world

_MATRIX = re.compile(
    r".*(attn\.(wq_a|wq_b|wkv|wo_a|wo_b|compressor\.(wkv|wgate))\.weight|engram\.wkv\.weight|main_proj\.weight"
    r"|ffn\.(experts\.(gate_up|down)|shared_experts\.w[123]\.weight))"
)
_DECAYED = re.compile(r"(head|embed)\.weight|.*engram\.embed\.weight")
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic step; from Muon's publication."""


@dataclass(frozen=True)
class Rates:
    """Learning rates at the peak of the schedule, and the other constants.

    Attributes:
        matrix: Muon's, in spectral norm per step.
        table: AdamW's for embedding, head and Engram's rows.
        other: AdamW's for the rest.
        decay: Decoupled weight decay of matrices and tables, times the rate.
    """

    matrix: float = 0.02
    table: float = 4e-3
    other: float = 2e-3
    decay: float = 0.02
    momentum: float = 0.95
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-10


def orthogonal(matrices: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Matrices [count, rows, columns] with singular values moved towards 1, by Newton-Schulz in bfloat16."""
    a, b, c = _COEFFICIENTS
    x = matrices.bfloat16()
    tall = x.shape[1] > x.shape[2]
    x = x.transpose(1, 2) if tall else x
    x = x / (x.float().square().sum((1, 2), keepdim=True).sqrt() + 1e-7).bfloat16()
    for _ in range(steps):
        gram = x @ x.transpose(1, 2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.transpose(1, 2) if tall else x).float()


class Optimizer:
    """One step for all trainable parameters of some modules.

    Args:
        named: Names and parameters; those that need no gradient are left alone.
        groups: ``o_groups`` of the config: how many matrices ``wo_a`` is.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], groups: int, rates: Rates) -> None:
        self.rates, self.groups, self.steps = rates, groups, 0
        self.parameters = {name: value for name, value in named if value.requires_grad}
        self.state: dict[str, torch.Tensor] = {}
        for name, value in self.parameters.items():
            self.state[f"{name}.first"] = torch.zeros_like(value)
            if not _MATRIX.fullmatch(name):
                self.state[f"{name}.second"] = torch.zeros_like(value)

    def zero(self) -> None:
        """Forget the gradients."""
        for value in self.parameters.values():
            value.grad = None

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """Update at ``factor`` times the peak rates; a parameter without a gradient keeps its value."""
        self.steps += 1
        given = {name: value for name, value in self.parameters.items() if value.grad is not None}
        for name, value in given.items():
            if not _MATRIX.fullmatch(name):
                assert value.grad is not None
                self._adam(name, value, value.grad, factor)
        self._muon({name: value for name, value in given.items() if _MATRIX.fullmatch(name)}, factor)

    def _muon(self, given: dict[str, torch.Tensor], factor: float) -> None:
        """Matrices of one shape are orthogonalised together, and each process does its part of them."""
        by_shape: dict[tuple[int, int], list[tuple[str, torch.Tensor]]] = {}
        for name, value in given.items():
            matrices = self._ahead(name, value)
            by_shape.setdefault((matrices.shape[1], matrices.shape[2]), []).append((name, matrices))
        changes = {shape: torch.cat([part for _, part in found]) for shape, found in by_shape.items()}
        for matrices in changes.values():
            mine = torch.arange(len(matrices)) % world() == rank()
            matrices[mine] = orthogonal(matrices[mine])
            matrices[~mine] = 0
        add_up(changes.values())
        rate = self.rates.matrix * factor
        for shape, found in by_shape.items():
            scale = max(1.0, shape[0] / shape[1]) ** 0.5
            for (name, _), change in zip(
                found, changes[shape].split([len(p) for _, p in found]), strict=True
            ):
                value = given[name]
                value.mul_(1 - rate * self.rates.decay).add_(change.view_as(value), alpha=-rate * scale)

    def _ahead(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Nesterov's momentum of a parameter as the matrices [count, rows, columns] that it holds."""
        assert value.grad is not None
        first = self.state[f"{name}.first"]
        first.lerp_(value.grad, 1 - self.rates.momentum)
        ahead = value.grad.lerp(first, self.rates.momentum)
        parts = 2 if name.endswith("gate_up") else self.groups if name.endswith("wo_a.weight") else 1
        return ahead.reshape(-1, ahead.shape[-2] // parts, ahead.shape[-1])

    def _adam(self, name: str, value: torch.Tensor, gradient: torch.Tensor, factor: float) -> None:
        first, second = self.state[f"{name}.first"], self.state[f"{name}.second"]
        one, two = self.rates.betas
        first.lerp_(gradient, 1 - one)
        second.lerp_(gradient.square(), 1 - two)
        table = _DECAYED.fullmatch(name) is not None
        rate = (self.rates.table if table else self.rates.other) * factor
        if table:
            value.mul_(1 - rate * self.rates.decay)
        denominator = (second / (1 - two**self.steps)).sqrt_().add_(self.rates.eps)
        value.addcdiv_(first, denominator, value=-rate / (1 - one**self.steps))
