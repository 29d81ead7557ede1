"""`vllm-deepinfer serve RECIPE`: a Ray cluster, the application on it, and both away again."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import ray
from ray import serve

from vllm_deepinfer.cluster.channel import ChannelKeys
from vllm_deepinfer.errors import UserError
from vllm_deepinfer.recipes.schema import Recipe

from .build import build_application
from .local_nodes import LocalNodes
from .placing import await_running

logger = logging.getLogger(__name__)
Say = Callable[[str], None]


class Application:
    """One running application. Use as a context: it is stopped, whatever happens.

    Args:
        recipe: Checked.
        commands, router: see `build_application`.
        say: told of progress, a line at a time.

    Attributes:
        urls: of the gateways, once started.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        commands: bool = False,
        router: str | None = None,
        say: Say = lambda line: None,
    ) -> None:
        self.recipe, self.urls = recipe, list[str]()
        self.session = secrets.token_hex(4)
        self._commands, self._router, self._say = commands, router, say
        self._nodes = LocalNodes(recipe.ray)

    def __enter__(self) -> Application:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *unused: object) -> None:
        self.stop()

    @property
    def local(self) -> bool:
        """Whether the cluster is this application's own."""
        return self.recipe.ray.address == "local"

    def start(self) -> None:
        """Raises: UserError, such as a pool that has no place."""
        os.environ.setdefault("RAY_SERVE_USE_COMPACT_SCHEDULING_STRATEGY", "0")
        self._connect()
        # Gateways listen themselves; Serve's proxies would cost 20 to 40 times as much per token.
        serve.start(proxy_location="Disabled")
        loopback = all(node["NodeManagerAddress"].startswith("127.") for node in ray.nodes())
        options: dict[str, Any] = {} if self._router is None else {"router": self._router}
        application = build_application(
            self.recipe,
            self.session,
            keys=None if loopback else ChannelKeys.make(),
            nodes=sum(node["Alive"] for node in ray.nodes()),
            commands=self._commands,
            **options,
        )
        target = serve.RunTarget(application, name=self.recipe.name, route_prefix=None)
        serve.run_many(
            [target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False
        )
        await_running(self.recipe.name, self.recipe, self._say)
        self.urls = self._gateway_urls()

    def handle(self, deployment: str) -> Any:
        """Serve's handle to a pool, or to the gateways."""
        return serve.get_deployment_handle(deployment, app_name=self.recipe.name)

    def stop(self) -> None:
        """Drain and stop all of it; a cluster that was joined goes on without us. Idempotent."""
        if ray.is_initialized():
            with contextlib.suppress(Exception):
                if self.local:
                    serve.shutdown()
                else:
                    serve.delete(self.recipe.name)
            ray.shutdown()
        self._nodes.stop()

    def _connect(self) -> None:
        quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
        namespace = self.recipe.ray.namespace or self.recipe.name
        if self.local:
            self._nodes.start(namespace, quiet)
            return
        try:
            ray.init(address=self.recipe.ray.address, namespace=namespace, **quiet)
        except ConnectionError as error:
            raise UserError(
                f"ray.address {self.recipe.ray.address}: no Ray cluster answers there ({_first(error)}); "
                "start one with `ray start --head`, or write local."
            ) from None

    def _gateway_urls(self) -> list[str]:
        answers = self.handle("gateway").broadcast("url").results(timeout_s=30)
        return sorted(str(url) for url in answers)


def _first(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


@contextlib.contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """SIGINT and SIGTERM set the event; a second one ends the process at once."""
    stop = threading.Event()

    def on(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.signal(number, on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def wait_for(stop: threading.Event, every_s: float, each: Callable[[], None]) -> None:
    """Call ``each`` at intervals until the event is set."""
    while not stop.wait(every_s):
        each()


def elapsed(since: float) -> str:
    """Seconds since then, for people."""
    return f"{time.monotonic() - since:.0f} s"
