"""An engine process ends when the process that started it has ended.

vLLM 0.32's engine core gets its work over sockets and does not notice that nobody is left to send any: after
a front end was killed (SIGKILL, or for lack of memory) it stays, with its memory and its cards. Its workers
have a pipe for that; the core has not.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading

CORE = "EngineCore"  # how vLLM names the process
GRACE_S = 10.0


def watch_parent() -> threading.Thread | None:
    """In an engine core, wait for the end of the parent in a thread; elsewhere do nothing. Idempotent."""
    parent = multiprocessing.parent_process()
    if parent is None or not multiprocessing.current_process().name.startswith(CORE):
        return None
    for thread in threading.enumerate():
        if thread.name == watch_parent.__name__:
            return thread
    thread = threading.Thread(target=_wait, args=(parent,), name=watch_parent.__name__, daemon=True)
    thread.start()
    return thread


def _wait(parent: multiprocessing.process.BaseProcess) -> None:
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)  # vLLM's own way down, which frees what it shares with others
    threading.Event().wait(GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)
