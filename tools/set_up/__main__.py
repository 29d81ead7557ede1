"""`python -m tools.set_up`: do what is missing, say what fails in one sentence."""

from __future__ import annotations

import fcntl
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from . import preflight, state, steps
from .failures import SetUpError

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def alone(root: Path) -> Iterator[None]:
    """Hold the checkout's set-up lock: `make serve` beside `make test` waits its turn."""
    (root / ".cache").mkdir(exist_ok=True)
    with open(root / ".cache" / "set-up.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("Waiting for another set-up in this checkout.", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def set_up(root: Path) -> None:
    """Bring `.venv` up to date; return at once when its stamp says that it is."""
    if state.is_current(root):
        return
    with alone(root):
        if state.is_current(root):  # the set-up that we waited for did our work
            return
        started = time.monotonic()
        preflight.check(root)
        steps.run(root)
        print(f"Set-up done in {time.monotonic() - started:.0f} s.", flush=True)


def main() -> int:
    """Exit status: 0, 1 after a failure told in one sentence, 130 after Ctrl-C."""
    try:
        set_up(ROOT)
    except SetUpError as error:
        print(f"Set-up failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Set-up interrupted; the next run starts it afresh.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
