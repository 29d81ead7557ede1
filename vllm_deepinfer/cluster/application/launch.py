"""`vllm-deepinfer serve RECIPE`: a Ray cluster, the application on it, and both away again."""

from __future__ import annotations

import contextlib
import io
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

from . import decisions
from .build import build_application
from .decisions import ScalingRecord
from .local_nodes import LocalNodes
from .metrics import ApplicationMetrics, MetricsServer
from .placing import await_running
from .slots import forget_slots
from .updates import changed_pools, refuse_changes

logger = logging.getLogger(__name__)
Say = Callable[[str], None]
DRAIN_EXTRA_S = 5.0
"""For a drained gateway's answer to reach us."""


class Application:
    """One running application. Use as a context: it is stopped, whatever happens.

    Args:
        recipe: Checked.
        commands, router: see `build_application`.
        say: told of progress, a line at a time.
        stopped: asked while it starts whether to give up.

    Attributes:
        urls: of the gateways, once started. metrics_url: of the metrics of all its processes.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        commands: bool = False,
        router: str | None = None,
        say: Say = lambda line: None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self.recipe, self.urls = recipe, list[str]()
        self.session = secrets.token_hex(4)
        self.metrics_url = ""
        self._commands, self._router, self._say, self._stopped = commands, router, say, stopped
        self._keys: ChannelKeys | None = None
        self._metrics: MetricsServer | None = None
        self._records: dict[str, ScalingRecord] = {}
        self._nodes, self._connected = LocalNodes(recipe.ray), False

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
        self._say("starting Ray" if self.local else f"joining Ray at {self.recipe.ray.address}")
        self._connected = not ray.is_initialized()
        with kept_handlers():
            self._connect()
        # Gateways listen themselves; Serve's proxies would cost 20 to 40 times as much per token.
        serve.start(proxy_location="Disabled")
        self._keys = None if self.local else ChannelKeys.make()
        self._deploy(self.recipe)
        await_running(self.recipe.name, self.recipe, self._say, self._stopped)
        self.urls = self._gateway_urls()
        self._serve_metrics()

    def update(self, recipe: Recipe) -> None:
        """Serve another recipe, checked like the first one: what it changes is replaced a few replicas at a
        time, each drained before it stops, while requests go on.

        Raises:
            UserError: something that cannot change while it runs; nothing has changed.
            PlacementError: A new replica has no place or does not start; Serve keeps trying.
        """
        refuse_changes(self.recipe, recipe)
        changes = changed_pools(self.recipe, recipe)
        if not changes:
            self._say("the recipe says nothing new")
            return
        for name, replaced in changes.items():
            self._say(
                f"pool {name}: {'its replicas are replaced' if replaced else 'other numbers of replicas'}"
            )
        self._deploy(recipe)
        self.recipe = recipe
        one_by_one = max(pool.replicas.max for pool in recipe.pools.values()) + 1
        await_running(recipe.name, recipe, self._say, self._stopped, rounds=one_by_one)

    def _deploy(self, recipe: Recipe) -> None:
        options: dict[str, Any] = {} if self._router is None else {"router": self._router}
        application = build_application(
            recipe,
            self.session,
            keys=self._keys,
            nodes=sum(node["Alive"] for node in ray.nodes()),
            commands=self._commands,
            **options,
        )
        target = serve.RunTarget(application, name=recipe.name, route_prefix=None)
        serve.run_many(
            [target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False
        )

    def handle(self, deployment: str) -> Any:
        """Serve's handle to a pool, or to the gateways."""
        return serve.get_deployment_handle(deployment, app_name=self.recipe.name)

    def watch(self) -> None:
        """Call now and then: tells of scaling decisions, and finds gateways that were replaced."""
        for name in self.recipe.pools:
            record = decisions.read(self.recipe.name, name)
            before = self._records.get(name)
            if record is not None and record != before:
                self._records[name] = record
                if record.reason:
                    self._say(f"pool {name} scales to {record.target} replicas: {record.reason}")
        with contextlib.suppress(Exception):
            self.urls[:] = self._gateway_urls()

    def stop(self) -> None:
        """Drain and stop all of it; a cluster that was joined goes on without us. Idempotent."""
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None
        if not self._connected:  # a connection of somebody else's in this process is not ours to end
            self._nodes.stop()
            return
        self._connected = False
        try:
            if ray.is_initialized():
                self._drain()
                # Serve kills its controller at the end, and the driver prints what that had not answered.
                with contextlib.suppress(Exception), contextlib.redirect_stdout(io.StringIO()):
                    if self.local:
                        serve.shutdown()
                    else:
                        serve.delete(self.recipe.name)
        finally:
            with contextlib.suppress(Exception), contextlib.redirect_stdout(io.StringIO()):
                ray.shutdown()
            self._nodes.stop()
            if self.local:
                forget_slots(self.session)

    def _drain(self) -> None:
        """Gateways first: Serve stops all deployments at once, and a running request may yet need a pool."""
        if self.urls:
            wait_s = self.recipe.gateway.drain_timeout_s + DRAIN_EXTRA_S
            with contextlib.suppress(Exception):
                self.handle("gateway").broadcast("drain").results(timeout_s=wait_s)
            self.urls.clear()

    def _serve_metrics(self) -> None:
        door = self.recipe.gateway
        handles = {name: self.handle(name) for name in self.recipe.pools}
        try:
            self._metrics = MetricsServer(
                ApplicationMetrics(self.recipe, handles, self.urls), door.host, door.metrics_port or 0
            )
        except OSError as error:
            raise UserError(
                f"gateway.metrics_port {door.metrics_port} of {door.host} cannot be used: {error.strerror}."
            ) from None
        self.metrics_url = self._metrics.url

    def _connect(self) -> None:
        quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
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
def kept_handlers() -> Iterator[None]:
    """Ray takes SIGTERM for itself when it connects, and then dies of it; afterwards it is ours again."""
    mine = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)} if mine else {}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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


@contextlib.contextmanager
def update_signal() -> Iterator[threading.Event]:
    """SIGUSR1 sets the event. Not SIGHUP: that comes with the end of a terminal, and has to end us."""
    wanted = threading.Event()
    before = signal.signal(signal.SIGUSR1, lambda number, frame: wanted.set())
    try:
        yield wanted
    finally:
        signal.signal(signal.SIGUSR1, before)


def wait_for(stop: threading.Event, every_s: float, each: Callable[[], None]) -> None:
    """Call ``each`` at intervals until the event is set."""
    while not stop.wait(every_s):
        each()


def elapsed(since: float) -> str:
    """Seconds since then, for people."""
    return f"{time.monotonic() - since:.0f} s"
