"""`vllm-deepinfer tiny-checkpoint`: the options of a small checkpoint on the command line."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from .errors import ConfigError
from .layout import ENCODINGS
from .options import TinyOptions
from .tiny import write_checkpoint

_MAX_LAYERS = 1000

# Which option a field of text_config comes from, for messages.
_OPTION_OF = {
    "num_hidden_layers": "--layers",
    "compress_ratios": "--ratios",
    "kv_source_layer_ids": "--kv-sources",
    "index_source_layer_ids": "--index-sources",
    "candidate_source_layer_id": "--candidate-source",
    "engram_layer_ids": "--engram-layers",
    "hidden_size": "--hidden",
    "num_attention_heads": "--heads",
    "head_dim": "--head-dim",
    "n_routed_experts": "--experts",
    "num_experts_per_tok": "--top-k",
    "moe_intermediate_size": "--expert-width",
    "sliding_window": "--window",
    "vocab_size": "--vocab",
    "max_position_embeddings": "--context-length",
    "num_nextn_predict_layers": "--dspark-blocks",
}


def tiny_checkpoint(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.")],
    layers: Annotated[
        int | None, typer.Option(help="Layers (default: 8, or as many as --ratios has).")
    ] = None,
    ratios: Annotated[
        str | None,
        typer.Option(
            help="Compression ratio per layer, such as 0,0,2,2,1,1 (default: window, then 2, then 1).",
            metavar="LIST",
        ),
    ] = None,
    kv_sources: Annotated[
        str | None,
        typer.Option(
            help="Layers that own a compressed cache (default: where the ratio changes).", metavar="LIST"
        ),
    ] = None,
    index_sources: Annotated[
        str | None,
        typer.Option(
            help="Layers that select anew (default: KV sources, every second layer after the last).",
            metavar="LIST",
        ),
    ] = None,
    candidate_source: Annotated[
        int | None,
        typer.Option(help="KV source that publishes candidate blocks, -1 for none (default: the last)."),
    ] = None,
    engram_layers: Annotated[
        str | None,
        typer.Option(
            help='Layers behind an Engram lookup, "" for none (default: 1 and the encoder\'s last).',
            metavar="LIST",
        ),
    ] = None,
    hidden: Annotated[int, typer.Option(help="Hidden size.")] = 64,
    heads: Annotated[int, typer.Option(help="Attention heads.")] = 4,
    head_dim: Annotated[int, typer.Option(help="Width of a head and of the shared KV.")] = 32,
    experts: Annotated[int, typer.Option(help="Routed experts.")] = 8,
    top_k: Annotated[int, typer.Option(help="Routed experts per token.")] = 2,
    expert_width: Annotated[
        int | None, typer.Option(help="Width of an expert (default: half the hidden size).")
    ] = None,
    window: Annotated[int, typer.Option(help="Sliding window, in tokens.")] = 16,
    vocab: Annotated[
        int | None, typer.Option(help="Vocabulary (default: 1024, or 129280 with the released tokenizer).")
    ] = None,
    tokenizer: Annotated[
        str, typer.Option(help="small: trained on a text of ours; released: DeepSeek's 129,280 entries.")
    ] = "small",
    context_length: Annotated[int, typer.Option(help="Longest sequence, in tokens.")] = 8192,
    dspark_blocks: Annotated[
        int, typer.Option(help="Blocks of the DSpark drafter, 0 for none, 3 as released.")
    ] = 0,
    encoding: Annotated[
        str,
        typer.Option(help="fp32, bf16, or released: FP8 with 32×32 scales, MXFP4 experts, FP8 Engram rows."),
    ] = "fp32",
    seed: Annotated[int, typer.Option(help="Seed of the random weights.")] = 0,
    shard_mb: Annotated[float, typer.Option(help="Largest weight file, in MB.")] = 1000.0,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="FIELD=VALUE",
            help="Any other field of text_config by its released name; repeatable.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a V4.1 checkpoint that is there.")] = False,
) -> None:
    """Write a small DeepSeek-V4.1 checkpoint: random weights, released layout, config and tokenizer."""
    choices = {
        "layers": layers,
        "ratios": _integers("--ratios", ratios),
        "kv_sources": _integers("--kv-sources", kv_sources),
        "index_sources": _integers("--index-sources", index_sources),
        "candidate_source": candidate_source,
        "engram_layers": _integers("--engram-layers", engram_layers),
        "hidden": hidden,
        "heads": heads,
        "head_dim": head_dim,
        "experts": experts,
        "top_k": top_k,
        "expert_width": expert_width,
        "window": window,
        "vocab": vocab,
        "tokenizer": _choice("--tokenizer", tokenizer, ("small", "released")),
        "context_length": context_length,
        "dspark_blocks": dspark_blocks,
        "encoding": _choice("--encoding", encoding, ENCODINGS),
        "seed": seed,
        "overrides": dict(_assignment(text) for text in set_ or ()),
    }
    for option, value, least, most in (
        ("--seed", seed, 0, None),
        ("--dspark-blocks", dspark_blocks, 0, _MAX_LAYERS),
        ("--layers", layers, 1, _MAX_LAYERS),
    ):
        if value is not None and value < least:
            raise ConfigError(f"{option} is {value}: write {least} or more")
        if value is not None and most is not None and value > most:
            raise ConfigError(f"{option} is {value}: write {most} or less")
    if not 0 < shard_mb < math.inf:
        raise ConfigError(f"--shard-mb is {shard_mb}: write a positive number")
    written = _write(out, choices, shard_bytes=int(shard_mb * 1e6), force=force)
    print(written)


def _write(out: Path, choices: dict[str, Any], *, shard_bytes: int, force: bool) -> str:
    try:
        options = TinyOptions(**choices)
        with _progress_bar() as bar:
            task = bar.add_task(f"writing {out}", total=None)
            written = write_checkpoint(
                out,
                options,
                shard_bytes=shard_bytes,
                force=force,
                progress=lambda done, total: bar.update(task, completed=done, total=total),
            )
    except ValidationError as error:
        raise ConfigError(f"{error.errors()[0]['loc'][0]}: {error.errors()[0]['msg']}") from None
    except ConfigError as error:
        raise ConfigError(_name_options(str(error))) from None
    except OSError as error:
        raise ConfigError(
            f"{out} cannot be written ({error.strerror or error}): name a folder elsewhere"
        ) from None
    return (
        f"{written.folder}: {written.parameters:,} parameters in {written.tensors} tensors, "
        f"{written.weight_bytes / 1e6:.1f} MB in {written.shards} weight file{'s' * (written.shards > 1)}"
    )


def _progress_bar() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())


def _name_options(message: str) -> str:
    """Put the option's name where a message starts with the field that the option sets."""
    field = re.match(r"text_config\.(\w+)", message)
    if field is None or field[1] not in _OPTION_OF:
        return message
    return f"{_OPTION_OF[field[1]]} ({field[0]}){message[field.end() :]}"


def _integers(option: str, text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(",")) if text.strip() else ()
    except ValueError:
        raise ConfigError(
            f'{option} is "{text}": write integers separated by commas, such as 0,2,1'
        ) from None


def _choice(option: str, text: str, choices: tuple[str, ...]) -> str:
    if text not in choices:
        raise ConfigError(f'{option} is "{text}": write one of {", ".join(choices)}')
    return text


def _assignment(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ConfigError(f'--set is "{text}": write FIELD=VALUE, such as index_topk=32')
    try:
        return name.strip(), json.loads(value)
    except ValueError:
        return name.strip(), value
