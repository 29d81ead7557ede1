"""Mixture of experts: sqrt-softplus router with a selection bias, clamped SwiGLU, one shared expert."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from vllm_deepinfer.checkpoint.config import TextConfig

from ..kernels import active
from .layers import Linear, Product
from .tiles import RowTiles


class Router(nn.Module):
    """Picks experts by biased score and weighs them by the unbiased one (``noaux_tc``).

    ``bias`` moves the selection of text tokens, ``bias_vl`` that of image tokens; neither enters the weights.
    """

    def __init__(self, config: TextConfig, experts: int, chosen: int) -> None:
        super().__init__()
        self.chosen, self.scale, self.renormalise = (
            chosen,
            config.routed_scaling_factor,
            config.norm_topk_prob,
        )
        self.weight = nn.Parameter(torch.empty(experts, config.hidden_size, dtype=torch.float32))
        nn.init.normal_(self.weight, std=config.hidden_size**-0.5)
        # No gradient reaches a selection bias; training moves it by load (noaux_tc).
        self.bias = nn.Parameter(torch.zeros(experts, dtype=torch.float32), requires_grad=False)
        self.bias_vl = nn.Parameter(torch.zeros(experts, dtype=torch.float32), requires_grad=False)

    def forward(self, x: torch.Tensor, image: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Experts of each token and their weights.

        Args:
            x: [tokens, hidden].
            image: [tokens] bool, True at image positions, or None for text alone.

        Returns:
            Expert ids [tokens, chosen] and float32 weights [tokens, chosen].
        """
        kernels = active(x)
        if kernels is not None and image is None:
            return kernels.route(x, self.weight, self.bias, self.chosen, self.scale, self.renormalise)
        scores = F.softplus(F.linear(x.float(), self.weight)).sqrt()
        bias = self.bias if image is None else torch.where(image.unsqueeze(-1), self.bias_vl, self.bias)
        experts = (scores + bias).topk(self.chosen, dim=-1).indices
        weights = scores.gather(1, experts)
        if self.renormalise and self.chosen > 1:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return experts, weights * self.scale


def swiglu(
    gate: torch.Tensor, up: torch.Tensor, limit: float, weight: torch.Tensor | None = None
) -> torch.Tensor:
    """SiLU(gate) × up × weight in float32, the gate clamped from above and the other factor on both sides.

    Args:
        gate: [tokens, width].
        up: [tokens, width].
        limit: Where to clamp; 0 for nowhere.
        weight: [tokens, 1] float32, the router's weight, or None.
    """
    wide_gate, wide_up = gate.float(), up.float()
    if limit > 0:
        wide_gate, wide_up = wide_gate.clamp(max=limit), wide_up.clamp(-limit, limit)
    product = F.silu(wide_gate) * wide_up
    return (product if weight is None else product * weight).to(gate.dtype)


class SharedExpert(nn.Module):
    """The expert that sees every token."""

    def __init__(self, config: TextConfig, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, width = config.hidden_size, config.moe_intermediate_size * config.n_shared_experts
        self.limit = config.swiglu_limit
        self.w1, self.w3 = Linear(hidden, width, dtype), Linear(hidden, width, dtype)
        self.w2 = Linear(width, hidden, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] in and out."""
        output: torch.Tensor = self.w2(swiglu(self.w1(x), self.w3(x), self.limit))
        return output


class RoutedExperts(nn.Module):
    """Stacked weights: ``gate_up`` [experts, 2 × width, hidden] and ``down`` [experts, hidden, width].

    ``packed`` holds a pair of products per expert once a library has packed the weights (see `packing`).
    """

    packed: list[tuple[Product, Product]] | None = None

    def __init__(self, config: TextConfig, experts: int, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, width = config.hidden_size, config.moe_intermediate_size
        self.experts, self.width, self.limit = experts, width, config.swiglu_limit
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * width, hidden, dtype=dtype))
        self.down = nn.Parameter(torch.empty(experts, hidden, width, dtype=dtype))
        nn.init.normal_(self.gate_up, std=hidden**-0.5)
        nn.init.normal_(self.down, std=width**-0.5)

    def forward(
        self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, tiles: RowTiles
    ) -> torch.Tensor:
        """Each token through its experts, weighted and added up in float32 in the order of the experts.

        Args:
            x: [tokens, hidden].
            experts: [tokens, chosen] ids.
            weights: [tokens, chosen], float32. They enter before the down projection, as in the release.

        Returns:
            [tokens, hidden].
        """
        order = experts.flatten().argsort(stable=True)
        counts = torch.bincount(experts.flatten(), minlength=self.experts).tolist()
        source = order // experts.shape[1]
        both = self._each(0, x[source], counts, tiles)
        hidden = tiles(self._activate, both, weights.flatten()[order].unsqueeze(-1))
        routed = self._each(1, hidden, counts, tiles)
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        return total.index_add(0, source, routed.float()).to(x.dtype)

    def _activate(self, both: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return swiglu(both[:, : self.width], both[:, self.width :], self.limit, weight)

    def _each(self, which: int, rows: torch.Tensor, counts: list[int], tiles: RowTiles) -> torch.Tensor:
        """Each expert's product over its part of the rows, which lie in the order of the experts."""
        outputs, start = [], 0
        for expert, count in enumerate(counts):
            if count:
                outputs.append(tiles(self._product(expert, which), rows[start : start + count]))
                start += count
        return torch.cat(outputs)

    def _product(self, expert: int, which: int) -> Product:
        if self.packed is not None:
            return self.packed[expert][which]
        weight = self.down[expert] if which else self.gate_up[expert]
        return lambda rows: F.linear(rows, weight)


class MoE(nn.Module):
    """Router, routed experts and the shared expert of one layer.

    ``packed`` takes over what the experts do, once a library has packed the weights (see `packing`).
    """

    packed: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] | None = None

    def __init__(self, config: TextConfig, dtype: torch.dtype, experts: int, chosen: int) -> None:
        super().__init__()
        self.gate = Router(config, experts, chosen)
        self.experts = RoutedExperts(config, experts, dtype)
        self.shared_experts = SharedExpert(config, dtype)

    def forward(
        self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, tiles: RowTiles
    ) -> torch.Tensor:
        """[tokens, hidden] from [tokens, hidden] and what `gate` chose: [tokens, chosen] ids and weights."""
        if self.packed is not None:
            return self.packed(x, experts, weights)
        routed = self.experts(x, experts, weights, tiles)
        output: torch.Tensor = routed + tiles(self.shared_experts, x)
        return output
