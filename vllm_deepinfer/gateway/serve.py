"""Runs one gateway in this process: socket, engine, app and signals, in that order, and back."""

from __future__ import annotations

import asyncio
import errno
import gc
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from vllm_deepinfer.engine import Engine, EngineDead, EngineError, HealthState
from vllm_deepinfer.errors import UserError
from vllm_deepinfer.gateway.app import GatewayApp
from vllm_deepinfer.gateway.building import build_app
from vllm_deepinfer.gateway.engines import make_engine
from vllm_deepinfer.gateway.limits.keys import KeyRing
from vllm_deepinfer.gateway.settings import GatewaySettings
from vllm_deepinfer.gateway.starting import answers_503
from vllm_deepinfer.gateway.streaming.lane import LaneProtocol

HEALTH_S = 0.5  # between two looks at the engine's health
GRACE_S = 5  # for the last events after the drain timeout, before uvicorn cuts the connections
STOP = (signal.SIGINT, signal.SIGTERM)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0: any free one. Raises: UserError."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserError(f"port {port} of {host} is taken; choose another with --port.") from None
        raise UserError(f"cannot listen on {host} port {port}: {error.strerror or error}.") from None


async def serve(
    engine_name: str,
    model: Path,
    arguments: list[str],
    settings: GatewaySettings,
    keys: KeyRing,
    listener: socket.socket,
    ready: Callable[[str], None],
) -> None:
    """Serve until SIGINT or SIGTERM; then let running answers end within the drain timeout.

    Args:
        engine_name, model, arguments: see `make_engine`.
        ready: called with the URL once requests are welcome.
    Raises: UserError when the engine does not start; EngineDead when it died later, so that whoever watches
        this process can start it again: a gateway without its engine answers 503 for ever.
    """
    engine = make_engine(engine_name, model, arguments)
    try:
        with _cancelled_by_signals():
            try:
                async with answers_503(listener):
                    await engine.start()
            except EngineError as error:
                raise UserError(str(error)) from None
        app = build_app(engine, model, settings, keys)
        app.own_engine = False
        calm_garbage_collection()
        config = uvicorn.Config(
            app,
            loop="none",
            http=LaneProtocol,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=round(settings.drain_timeout_s) + GRACE_S,
        )
        host, port = listener.getsockname()[:2]
        ready(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")
        server = _Server(config, app, engine, settings.drain_timeout_s)
        watching = asyncio.create_task(server.watch_engine(), name="engine watch")
        await server.serve(sockets=[listener])
        watching.cancel()
        if server.died is not None:
            raise EngineDead(server.died)
    finally:
        await engine.close()


def calm_garbage_collection() -> None:
    """Call once all is built: what start-up has made is never looked through, and the rest less often.

    A step of 256 streams makes 256 lists of token ids. With CPython's threshold of 700 new objects that is a
    collection every third step, for garbage that needs none: 5 % of the gateway's CPU, and pauses.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


class _Server(uvicorn.Server):
    """A signal drains the app first, so that what does not end in time ends with an error and not with a cut.

    uvicorn's own handling raises the signal again at the end, before the engine could be closed.
    """

    def __init__(
        self, config: uvicorn.Config, app: GatewayApp, engine: Engine, drain_timeout_s: float
    ) -> None:
        super().__init__(config)
        self._app, self._engine, self._drain_timeout_s = app, engine, drain_timeout_s
        self._draining: asyncio.Task[bool] | None = None
        self.died: str | None = None

    async def watch_engine(self) -> None:
        """Stop when the engine has died; `died` is why."""
        while (health := self._engine.health()).state is not HealthState.DEAD:
            await asyncio.sleep(HEALTH_S)
        if self._draining is None:
            self.died = health.detail
        self.should_exit = True

    def _stop(self, number: int) -> None:
        if self._draining is None:
            running = self._engine.load().active_requests
            if running:
                print(
                    f"Stopping: waiting up to {self._drain_timeout_s:g} s for {running} running requests; "
                    "the same signal again stops at once.",
                    file=sys.stderr,
                    flush=True,
                )
            self._draining = asyncio.get_running_loop().create_task(self._app.drain())
        self.handle_exit(number, None)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in STOP:
            loop.add_signal_handler(number, self._stop, number)
        try:
            yield
        finally:
            for number in STOP:
                loop.remove_signal_handler(number)


@contextmanager
def _cancelled_by_signals() -> Iterator[None]:
    """A signal cancels the current task, so that its `finally` runs."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    for number in STOP:
        loop.add_signal_handler(number, task.cancel)
    try:
        yield
    finally:
        for number in STOP:
            loop.remove_signal_handler(number)
