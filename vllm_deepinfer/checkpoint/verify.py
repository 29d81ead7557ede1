"""Compares a checkpoint's file headers with what its config implies, before any weight is read."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from .config import V41Config
from .errors import CheckpointError
from .files import Header, read_headers
from .tensors import FLOATS, Entry, Kind, entries, quantised_shapes, scale_name

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

# The vision tower and its projector: legal beside the text model, which does not load them.
VISION_PREFIXES = ("vision.", "aligner.")
VISION_NAMES = frozenset({"image_start", "image_end", "image_newline"})


def verify_headers(folder: Path | str, config: V41Config) -> None:
    """Raise unless the folder's weights are exactly those that the config describes.

    Each weight may be stored quantised as in the release or in any floating type, whatever the others are.
    The vision tower (``vision.*``, ``aligner.*``, the three ``image_*`` vectors) may be there or not. The
    DSpark blocks are judged by ``num_nextn_predict_layers``: vLLM's backbone loader skips ``mtp.*`` and its
    drafter loads nothing else, so a checkpoint that announces blocks without holding them would fail only
    when speculation is turned on, and one that holds blocks without announcing them would never use them;
    both are refused here. The confidence head alone is optional, as in vLLM.

    Raises:
        CheckpointError: A file is missing or damaged, or a tensor is missing, extra, misshapen or lacks its
            scale.
    """
    found = read_folder(Path(folder))
    wanted = dict(entries(config))
    _check_names(found, wanted)
    for name, entry in wanted.items():
        if name in found:
            _check_tensor(name, entry, found)


def read_folder(folder: Path) -> dict[str, Header]:
    """The headers of every tensor that a checkpoint folder holds, through its index or its single file.

    Raises:
        CheckpointError: A file is missing or damaged, or the index disagrees with the files.
    """
    if not (folder / INDEX).is_file():
        if not (folder / SINGLE).is_file():
            raise CheckpointError(f"{folder} has neither {INDEX} nor {SINGLE}: name a checkpoint folder")
        return read_headers(folder / SINGLE)
    weight_map = _read_index(folder / INDEX)
    found: dict[str, Header] = {}
    for file in sorted(set(weight_map.values())):
        if not (folder / file).is_file():
            raise CheckpointError(f"{folder / INDEX} names {file}, which is not there: download it again")
        for name, header in read_headers(folder / file).items():
            if weight_map.get(name) != file:
                raise CheckpointError(
                    f"{folder / file} holds {name}, but the index says otherwise: write a new index"
                )
            found[name] = header
    lost = [name for name in weight_map if name not in found]
    if lost:
        raise CheckpointError(
            f"{weight_map[lost[0]]} lacks {_some(lost)} that the index names: download it again"
        )
    return found


def _read_index(file: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
        if not all(isinstance(name, str) and Path(name).name == name for name in weight_map.values()):
            raise ValueError("a file name with a folder")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} is no index of safetensors files ({error}): write a new one") from None
    return dict(weight_map)


def _check_names(found: dict[str, Header], wanted: dict[str, Entry]) -> None:
    missing = [name for name, entry in wanted.items() if name not in found and not entry.optional]
    if missing:
        draft = all(name.startswith("mtp.") for name in missing)
        cure = "or set num_nextn_predict_layers to 0 for no drafter" if draft else "as config.json implies"
        raise CheckpointError(f"the checkpoint lacks {_some(missing)}: add what is missing, {cure}")
    scales = {scale_name(name): name for name, entry in wanted.items() if entry.quantisable}
    extra = [name for name in found if name not in wanted and name not in scales and not _is_vision(name)]
    if extra:
        raise CheckpointError(
            f"the checkpoint holds {_some(extra)} that config.json does not describe: correct either"
        )
    orphans = [
        name for name in found if name in scales and found.get(scales[name], _NONE).dtype in (*FLOATS, "")
    ]
    if orphans:
        raise CheckpointError(
            f"the checkpoint holds {_some(orphans)}, but the weight beside it is not quantised: drop it"
        )


_NONE = Header("", ())


def _check_tensor(name: str, entry: Entry, found: dict[str, Header]) -> None:
    header = found[name]
    if header.dtype in FLOATS:
        _check_shape(name, header, entry.shape)
        return
    expected = {Kind.EXPERT: "I8", Kind.DENSE: "F8_E4M3", Kind.ROWS: "F8_E4M3"}.get(entry.kind)
    if header.dtype != expected:
        legal = sorted(FLOATS | {expected} if expected else FLOATS)
        raise CheckpointError(f"{name} has the type {header.dtype}: store it as one of {', '.join(legal)}")
    weight_shape, scale_shape = quantised_shapes(entry)
    _check_shape(name, header, weight_shape)
    scale = found.get(scale_name(name))
    if scale is None:
        raise CheckpointError(f"{name} is quantised, but {scale_name(name)} is missing: add the scale")
    if scale.dtype != "F8_E8M0":
        raise CheckpointError(f"{scale_name(name)} has the type {scale.dtype}: store it as F8_E8M0")
    _check_shape(scale_name(name), scale, scale_shape)


def _check_shape(name: str, header: Header, shape: tuple[int, ...]) -> None:
    if header.shape != shape:
        raise CheckpointError(
            f"{name} has the shape {list(header.shape)}, but config.json implies {list(shape)}: correct "
            "either"
        )


def _is_vision(name: str) -> bool:
    return name in VISION_NAMES or name.startswith(VISION_PREFIXES)


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    more = len(listed) - 1
    return listed[0] + (f" and {more} more tensor{'s' * (more > 1)}" if more else "")
