"""Every tensor of the released layout, by name, with its mathematical shape."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from .config import TextConfig, V41Config
from .encoding import BLOCK
from .schedule import LayerPlan

FLOATS = frozenset({"F32", "BF16", "F16"})


class Kind(Enum):
    """How the release stores a tensor."""

    DENSE = "FP8 with a scale per 32×32 block"
    ROWS = "FP8 with a scale per row and 32 columns"
    EXPERT = "MXFP4 with a scale per row and 32 columns"
    PLAIN = "BF16"
    EXACT = "F32"


@dataclass(frozen=True)
class Entry:
    """One tensor by its mathematical shape, before any encoding."""

    shape: tuple[int, ...]
    kind: Kind = Kind.PLAIN
    optional: bool = False

    @property
    def quantisable(self) -> bool:
        """Whether the release stores it quantised, with a scale beside it."""
        return self.kind in (Kind.DENSE, Kind.ROWS, Kind.EXPERT)


def scale_name(weight: str) -> str:
    """``a.b.weight`` has its scale in ``a.b.scale``."""
    return weight.removesuffix(".weight") + ".scale"


def quantised_shapes(entry: Entry) -> tuple[tuple[int, int], tuple[int, int]]:
    """Stored shapes of a quantised weight and of its scale."""
    rows, columns = entry.shape
    across = -(-columns // BLOCK)
    if entry.kind is Kind.EXPERT:
        return (rows, columns // 2), (rows, across)
    return (rows, columns), (rows if entry.kind is Kind.ROWS else -(-rows // BLOCK), across)


def entries(config: V41Config | TextConfig) -> Iterator[tuple[str, Entry]]:
    """Name and mathematical shape of every tensor of the text model, in the order of the layers."""
    text = config.text_config if isinstance(config, V41Config) else config
    yield "embed.weight", Entry((text.vocab_size, text.hidden_size))
    for plan in text.schedule():
        yield from _prefixed(f"layers.{plan.index}.", _layer(text, plan))
    yield "norm.weight", Entry((text.hidden_size,))
    yield "head.weight", Entry((text.vocab_size, text.hidden_size))
    for block in range(text.num_nextn_predict_layers):
        yield from _prefixed(f"mtp.{block}.", _draft_block(text, block))


def _prefixed(prefix: str, items: Iterator[tuple[str, Entry]]) -> Iterator[tuple[str, Entry]]:
    for name, entry in items:
        yield prefix + name, entry


def _layer(text: TextConfig, plan: LayerPlan) -> Iterator[tuple[str, Entry]]:
    if plan.engram is not None:
        yield from _engram(text, text.engram_num_embeddings[plan.engram])
    yield from _block(text, text.n_routed_experts)
    if plan.owns_kv:
        yield from _compressor(text, plan.ratio)
    if plan.owns_index:
        yield from _indexer(text, owns_keys=plan.owns_kv)


def _block(text: TextConfig, experts: int) -> Iterator[tuple[str, Entry]]:
    """What every backbone layer and every DSpark block has."""
    hidden, mixes = text.hidden_size, text.hc_mult * (text.hc_mult + 2)
    yield "attn_norm.weight", Entry((hidden,))
    yield "ffn_norm.weight", Entry((hidden,))
    for part in ("attn", "ffn"):
        yield f"hc_{part}_fn", Entry((mixes, text.hc_mult * hidden), Kind.EXACT)
        yield f"hc_{part}_base", Entry((mixes,), Kind.EXACT)
        yield f"hc_{part}_scale", Entry((3,), Kind.EXACT)
    yield from _attention(text)
    yield "ffn.gate.weight", Entry((experts, hidden))
    yield "ffn.gate.bias", Entry((experts,), Kind.EXACT)
    yield "ffn.gate.bias_vl", Entry((experts,), Kind.EXACT)
    for expert in range(experts):
        yield from _swiglu(text, f"ffn.experts.{expert}.", Kind.EXPERT)
    yield from _swiglu(text, "ffn.shared_experts.", Kind.DENSE)


def _attention(text: TextConfig) -> Iterator[tuple[str, Entry]]:
    heads, width, groups = text.num_attention_heads, text.head_dim, text.o_groups
    yield "attn.attn_sink", Entry((heads,), Kind.EXACT)
    yield "attn.q_norm.weight", Entry((text.q_lora_rank,))
    yield "attn.kv_norm.weight", Entry((width,))
    yield "attn.wq_a.weight", Entry((text.q_lora_rank, text.hidden_size), Kind.DENSE)
    yield "attn.wq_b.weight", Entry((heads * width, text.q_lora_rank), Kind.DENSE)
    yield "attn.wkv.weight", Entry((width, text.hidden_size), Kind.DENSE)
    yield "attn.wo_a.weight", Entry((groups * text.o_lora_rank, heads * width // groups), Kind.DENSE)
    yield "attn.wo_b.weight", Entry((text.hidden_size, groups * text.o_lora_rank), Kind.DENSE)


def _compressor(text: TextConfig, ratio: int) -> Iterator[tuple[str, Entry]]:
    yield "attn.compressor.wkv.weight", Entry((text.head_dim, text.hidden_size))
    if ratio > 1:  # one token per compressed position leaves nothing to gate
        yield "attn.compressor.wgate.weight", Entry((text.head_dim, text.hidden_size))
    yield "attn.compressor.norm.weight", Entry((text.head_dim,))


def _indexer(text: TextConfig, *, owns_keys: bool) -> Iterator[tuple[str, Entry]]:
    heads, width = text.index_n_heads, text.index_head_dim
    yield "attn.indexer.wq_b.weight", Entry((heads * width, text.q_lora_rank), Kind.DENSE)
    yield "attn.indexer.weights_proj.weight", Entry((heads, text.hidden_size))
    if owns_keys:
        yield "attn.indexer.wk.weight", Entry((width, text.head_dim))
        yield "attn.indexer.k_norm.weight", Entry((width,))


def _swiglu(text: TextConfig, prefix: str, kind: Kind) -> Iterator[tuple[str, Entry]]:
    hidden, width = text.hidden_size, text.moe_intermediate_size
    yield f"{prefix}w1.weight", Entry((width, hidden), kind)
    yield f"{prefix}w2.weight", Entry((hidden, width), kind)
    yield f"{prefix}w3.weight", Entry((width, hidden), kind)


def _engram(text: TextConfig, rows: int) -> Iterator[tuple[str, Entry]]:
    columns = (text.engram_max_ngram_size - 1) * text.engram_n_heads * text.engram_head_dim
    yield "engram.embed.weight", Entry((rows, text.engram_head_dim), Kind.ROWS)
    yield "engram.wkv.weight", Entry((text.hidden_size * (text.hc_mult + 1), columns), Kind.DENSE)
    yield "engram.q_weight", Entry((text.hc_mult, text.hidden_size))
    yield "engram.k_weight", Entry((text.hc_mult, text.hidden_size))


def _draft_block(text: TextConfig, block: int) -> Iterator[tuple[str, Entry]]:
    """A DSpark block; the first takes the tapped inputs in, the last has the heads."""
    hidden, rank = text.hidden_size, text.dspark_markov_rank
    yield from _block(text, text.dspark_n_routed_experts)
    if block == 0:
        yield "main_proj.weight", Entry((hidden, len(text.dspark_target_layer_ids) * hidden), Kind.DENSE)
        yield "main_norm.weight", Entry((hidden,))
    if block == text.num_nextn_predict_layers - 1:
        yield "norm.weight", Entry((hidden,))
        yield "markov_head.embed.weight", Entry((text.vocab_size, rank))
        yield "markov_head.head.weight", Entry((text.vocab_size, rank))
        # vLLM's drafter verifies a fixed number of tokens when a checkpoint has none.
        yield "confidence_head.proj.weight", Entry((1, hidden + rank), optional=True)
