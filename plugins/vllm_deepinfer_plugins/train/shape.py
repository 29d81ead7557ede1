"""The trained model's shape and how its weights begin."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer
from torch import nn

from vllm_deepinfer.checkpoint.config import V41Config
from vllm_deepinfer.checkpoint.engram import EngramHash
from vllm_deepinfer.checkpoint.options import TinyOptions

from ..draft.blocks import Drafter
from ..model.backbone import Backbone
from ..model.mhc import HyperConnection
from .lookup import begin_lookup

OPTIONS = TinyOptions(
    hidden=160,
    heads=4,
    head_dim=64,
    experts=8,
    top_k=2,
    expert_width=64,
    window=32,
    context_length=16384,
    dspark_blocks=3,
    encoding="bf16",
    overrides={
        "q_lora_rank": 96,
        "o_lora_rank": 64,
        "qk_rope_head_dim": 16,
        "index_n_heads": 2,
        "index_head_dim": 32,
        "index_topk": 64,
        "candidate_topk_blocks": 48,
        "candidate_block_size": 8,
        "hc_sinkhorn_iters": 4,
        "engram_vocab_size": 700,
        "dspark_n_routed_experts": 4,
        "dspark_num_experts_per_tok": 2,
        "dspark_markov_rank": 32,
    },
)
"""Eight layers in the released order (two of window, two of ratio 2, four of ratio 1), 5.4 M parameters.

Widths are multiples of 32, because the released encoding has a scale per 32 columns. Four Sinkhorn rounds
instead of twenty: matrices that begin near the identity need no more."""

_OWN, _OTHER, _STAY = 1.0, -1.0, 3.0


def config_fields(tokenizer: Tokenizer, options: TinyOptions = OPTIONS) -> dict[str, Any]:
    """The config.json of a model of that shape over a tokenizer."""
    return options.build_config(tokenizer)


def build_backbone(fields: dict[str, Any], tokenizer: Tokenizer, seed: int) -> Backbone:
    """A backbone in float32 that has learnt nothing: the same weights for the same seed."""
    text = V41Config.from_dict(fields).text_config
    model = Backbone(text, EngramHash.build(text, tokenizer) if text.engram_layer_ids else None)
    generator = torch.Generator().manual_seed(seed)
    for name, value in model.named_parameters():
        if name != "embed.weight":  # `begin_lookup` fills it
            _begin(name, value, generator)
    _begin_mixers(model, generator)
    begin_lookup(model, generator)
    return model


def build_drafter(fields: dict[str, Any], seed: int) -> Drafter:
    """A drafter in float32 that has learnt nothing."""
    drafter = Drafter(V41Config.from_dict(fields).text_config)
    generator = torch.Generator().manual_seed(seed + 1)
    for name, value in drafter.named_parameters():
        _begin(name, value, generator)
    _begin_mixers(drafter, generator)
    return drafter


@torch.no_grad()
def _begin(name: str, value: nn.Parameter, generator: torch.Generator) -> None:
    """What is added to the streams begins at zero, all else at the size that keeps activations near 1."""
    if value.ndim < 2 or name.endswith(("q_weight", "k_weight")):
        return  # norms, sinks and biases have their neutral values
    if name.endswith(("wo_b.weight", "experts.down", "shared_experts.w2.weight", "markov_head.head.weight")):
        value.zero_()
    elif name.endswith("engram.embed.weight"):
        value.normal_(std=0.1, generator=generator)
    elif name.endswith("embed.weight"):
        value.normal_(std=0.5, generator=generator)
    elif name.endswith(("head.weight", "confidence_head.proj.weight")):
        value.normal_(std=0.02, generator=generator)
    else:
        value.normal_(std=value.shape[-1] ** -0.5, generator=generator)


@torch.no_grad()
def _begin_mixers(model: nn.Module, generator: torch.Generator) -> None:
    """Streams pass unmixed, and each sub-layer reads mostly one of them, in turn."""
    mixers = [module for module in model.modules() if isinstance(module, HyperConnection)]
    for number, mixer in enumerate(mixers):
        n = mixer.streams
        mixer.fn.normal_(std=0.01, generator=generator)
        mixer.base.zero_()
        mixer.base[:n] = _OTHER
        mixer.base[(number + 1) % n] = _OWN
        mixer.base[2 * n :].view(n, n).fill_diagonal_(_STAY)
