"""Whether two folders hold the same model, told from a few kilobytes per file."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from .errors import CheckpointError

_SAMPLE = 1 << 16  # bytes from the middle of each weight file: other weights of the same shapes differ there
_OF_THE_WRITER = frozenset({"_name_or_path", "transformers_version", "torch_dtype"})
_WEIGHTS = "*.safetensors"


def fingerprint(folder: Path | str) -> str:
    """Digest of config.json, tokenizer.json, and of each weight file's name, size, header and middle.

    Equal for copies of one checkpoint, whatever program wrote its config.json in which order of keys.

    Raises:
        CheckpointError: A file cannot be read.
    """
    folder, digest = Path(folder), hashlib.sha256()
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if isinstance(config, dict):
            config = {key: value for key, value in config.items() if key not in _OF_THE_WRITER}
        digest.update(json.dumps(config, sort_keys=True).encode())
        tokenizer = folder / "tokenizer.json"
        digest.update(tokenizer.read_bytes() if tokenizer.exists() else b"")
        for file in sorted(folder.glob(_WEIGHTS)):
            digest.update(_sampled(file))
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot be read ({error.strerror}): name a checkpoint folder"
        ) from None
    except ValueError:
        raise CheckpointError(f"{folder / 'config.json'} is no JSON: download it again") from None
    return digest.hexdigest()


def _sampled(file: Path) -> bytes:
    size = file.stat().st_size
    digest = hashlib.sha256(f"{file.name} {size}".encode())
    with file.open("rb") as stream:
        first = stream.read(8)
        length = min(int.from_bytes(first, "little"), size)  # of the header, in a safetensors file
        digest.update(first + stream.read(length))
        stream.seek(8 + length + max(0, (size - 8 - length - _SAMPLE) // 2))
        digest.update(stream.read(_SAMPLE))
    return digest.digest()
