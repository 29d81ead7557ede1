"""Writes a small checkpoint: all of it or nothing, the same bytes for the same options."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from .config import MODEL_TYPE, V41Config
from .errors import CheckpointError
from .files import Header, write_file
from .layout import Encoding
from .options import TinyOptions
from .tensors import Entry, entries
from .tokenizer import tokenizer_files
from .verify import INDEX, verify_headers
from .weights import random_values, stored_arrays, stored_headers

Progress = Callable[[int, int], None]

GENERATION = {
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "do_sample": True,
    "temperature": 1.0,
    "top_p": 1.0,
}


@dataclass(frozen=True)
class Written:
    """What a finished checkpoint amounts to."""

    folder: Path
    tensors: int
    parameters: int
    weight_bytes: int
    shards: int


def write_checkpoint(
    out: Path,
    options: TinyOptions,
    *,
    shard_bytes: int = 1 << 30,
    force: bool = False,
    progress: Progress = lambda done, total: None,
) -> Written:
    """Write a checkpoint folder in the released layout.

    The folder appears under its name only when it is complete; until then its files are in a hidden folder
    beside it.

    Args:
        out: The folder to write; it must not exist, or be empty, or hold a V4.1 checkpoint and ``force`` be
            set.
        options: What to write.
        shard_bytes: Upper limit of a weight file's data; a single larger tensor gets a file of its own.
        force: Replace an older checkpoint.
        progress: Called with the bytes of weights written so far and in all.

    Raises:
        ConfigError: The options describe no model.
        CheckpointError: The folder is in use, or the disk has no room.
    """
    out = Path(os.path.realpath(out))  # a link stays, and what it leads to is written
    tokenizer = options.build_tokenizer()
    fields = options.build_config(tokenizer)
    config = V41Config.from_dict(fields)
    shards = _plan_shards(config, options.encoding, shard_bytes)
    total = sum(
        header.nbytes for shard in shards for headers in shard.values() for header in headers.values()
    )
    _check_target(out, force=force, needed=total)
    texts = tokenizer_files(tokenizer, context_length=config.text_config.max_position_embeddings)
    texts |= {"config.json": _json(fields), "generation_config.json": _json(GENERATION)}

    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        partial.mkdir(parents=True)
        for name, text in texts.items():
            (partial / name).write_text(text, encoding="utf-8", newline="\n")
        _write_shards(partial, shards, dict(entries(config)), options, lambda done: progress(done, total))
        verify_headers(partial, config)
        _move_into_place(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    headers = {name: header for shard in shards for group in shard.values() for name, header in group.items()}
    parameters = sum(_size(entry) for _, entry in entries(config))
    return Written(out, len(headers), parameters, total, len(shards))


# A shard is a group of entries, each with the headers of the arrays that it is stored as.
_Shard = dict[str, dict[str, Header]]


def _plan_shards(config: V41Config, encoding: Encoding, limit: int) -> list[_Shard]:
    """Fill files in the order of the layers; a weight and its scale stay together."""
    shards: list[_Shard] = [{}]
    used = 0
    for name, entry in entries(config):
        headers = stored_headers(name, entry, encoding)
        size = sum(header.nbytes for header in headers.values())
        if used + size > limit and shards[-1]:
            shards.append({})
            used = 0
        shards[-1][name] = headers
        used += size
    return shards


def _write_shards(
    folder: Path,
    shards: list[_Shard],
    shapes: dict[str, Entry],
    options: TinyOptions,
    progress: Callable[[int], None],
) -> None:
    weight_map: dict[str, str] = {}
    done = 0

    def arrays(shard: _Shard) -> Iterator[tuple[str, NDArray[Any]]]:
        nonlocal done
        for name in shard:
            values = random_values(name, shapes[name], options.seed)
            yield from stored_arrays(name, shapes[name], options.encoding, values)
            done += sum(header.nbytes for header in shard[name].values())
            progress(done)

    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        headers = {name: header for group in shard.values() for name, header in group.items()}
        write_file(folder / file, headers, arrays(shard))
        weight_map |= dict.fromkeys(headers, file)
    index = {"metadata": {"total_size": done}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(_json(index), encoding="utf-8", newline="\n")


def _check_target(out: Path, *, force: bool, needed: int) -> None:
    if out.exists() and not out.is_dir():
        raise CheckpointError(f"{out} is a file: name a new folder")
    if out.is_dir() and any(out.iterdir()):
        if not force:
            raise CheckpointError(
                f"{out} is not empty: name a new folder, or add --force to replace a checkpoint"
            )
        if not _holds_checkpoint(out):
            raise CheckpointError(
                f"{out} holds no DeepSeek-V4.1 checkpoint, so --force would delete something else: name a "
                "new folder"
            )
    nearest = next(parent for parent in out.parents if parent.exists())
    if not os.access(nearest, os.W_OK):
        raise CheckpointError(f"{nearest} cannot be written to: name a folder elsewhere")
    free = shutil.disk_usage(nearest).free
    if needed > free:
        raise CheckpointError(
            f"{nearest} has {free:,} bytes free, but the weights take {needed:,}: choose smaller sizes"
        )


def _holds_checkpoint(folder: Path) -> bool:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and config.get("model_type") == MODEL_TYPE


def _move_into_place(partial: Path, out: Path) -> None:
    """Rename, which is atomic; an older checkpoint steps aside first and is deleted last."""
    if not out.exists():
        partial.rename(out)
        return
    old = out.with_name(f".{out.name}.{os.getpid()}.old")
    out.rename(old)
    try:
        partial.rename(out)
    except OSError:
        old.rename(out)
        raise
    shutil.rmtree(old)


def _size(entry: Entry) -> int:
    size = 1
    for length in entry.shape:
        size *= length
    return size


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
