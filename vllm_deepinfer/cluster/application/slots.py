"""Numbers that the processes of one node share out among themselves: cores, ports."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from pathlib import Path

from vllm_deepinfer.errors import UserError

_held: dict[Path, int] = {}


def claim_slot(series: str) -> int:
    """The lowest number of a series that no other process of this node has; free again when this one ends.

    Raises: UserError.
    """
    folder = _folder()
    for slot in range(4096):
        file = folder / f"{series}-{slot}.lock"
        handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(handle)
            continue
        _held[file] = handle  # the lock lives as long as the handle
        return slot
    raise UserError(f"no free slot in {folder} for {series}.")


def release_slots() -> None:
    """This process ends in good order: its numbers are free, and their files gone."""
    for file, handle in _held.items():
        file.unlink(missing_ok=True)
        os.close(handle)
    _held.clear()


def forget_slots(session: str) -> None:
    """Remove what killed processes of a session have left on this node; none of it runs any more."""
    with contextlib.suppress(UserError):
        for file in _folder().glob(f"{session}-*.lock"):
            file.unlink(missing_ok=True)


def _folder() -> Path:
    folder = Path(tempfile.gettempdir()) / f"vllm-deepinfer-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise UserError(f"{folder} belongs to somebody else; remove it, or set TMPDIR.")
    return folder
