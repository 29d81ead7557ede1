"""A Ray cluster of this machine's own: on the loopback, in a folder of its own, gone with the application."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray

from vllm_deepinfer.errors import UserError
from vllm_deepinfer.recipes.schema import Ray

from .placement import bundle_of
from .specs import LOOPBACK

logger = logging.getLogger(__name__)


class LocalNodes:
    """The head in this process's care, and further nodes as `ray start` would make them.

    Other clusters on the machine are not touched: every process that is ended here was started here.
    """

    def __init__(self, settings: Ray) -> None:
        self._settings = settings
        self._folder: Path | None = None
        self._cluster: Any = None

    def start(self, namespace: str, quiet: dict[str, Any]) -> None:
        """Start and connect. Raises: UserError."""
        if ray.is_initialized():
            raise UserError(
                "this process is already connected to a Ray cluster; start the recipe from a fresh one."
            )
        os.environ.pop("RAY_ADDRESS", None)  # that would be somebody else's cluster
        # Ray runs its workers at nice 15 by default. Ours are the service: gateways and engines, which
        # anything else on the machine would take the cores from.
        os.environ.setdefault("RAY_worker_niceness", "0")
        if self._settings.dashboard_port is None:
            # Nobody looks at Ray's list of tasks, and every request's call would be told to it, twice.
            os.environ.setdefault("RAY_task_events_report_interval_ms", "0")
        # Ray listens on all of the machine's addresses. Only who has the user's token (~/.ray/auth_token,
        # made by Ray 2.60 when it is missing) may speak to it, unless RAY_AUTH_MODE=disabled is set.
        self._folder = Path(tempfile.mkdtemp(prefix="vdi-"))  # short: socket paths are limited to 107 bytes
        store = int(self._settings.object_store_gib * (1 << 30))
        if not self._settings.local_nodes:
            ray.init(
                address="local",
                namespace=namespace,
                num_cpus=self._settings.num_cpus,
                object_store_memory=store,
                include_dashboard=self._settings.dashboard_port is not None,
                dashboard_host=LOOPBACK,
                dashboard_port=self._settings.dashboard_port,
                _node_ip_address=LOOPBACK,
                _temp_dir=str(self._folder),
                **quiet,
            )
            return
        from ray.cluster_utils import Cluster

        # No node_ip_address: a head bound to the loopback is not found by Ray's own clients, which take
        # 127.0.0.1 for another name of the machine's address.
        head: dict[str, Any] = {"object_store_memory": store}
        head["num_cpus"] = self._settings.num_cpus or os.cpu_count()
        self._cluster = Cluster(
            initialize_head=True,
            head_node_args={**head, "include_dashboard": False, "temp_dir": str(self._folder)},
        )
        for node in self._settings.local_nodes:
            bundle = bundle_of(node)
            self._cluster.add_node(
                num_cpus=bundle.pop("CPU", 0),
                num_gpus=bundle.pop("GPU", 0),
                memory=bundle.pop("memory", None),
                resources=bundle,
                labels=dict(node.node_labels),
                object_store_memory=store,
            )
        self._cluster.wait_for_nodes()
        ray.init(address=self._cluster.address, namespace=namespace, **quiet)

    def stop(self) -> None:
        """End every process of the cluster, and its folder. Idempotent."""
        if self._cluster is not None:
            with contextlib.suppress(Exception):
                self._cluster.shutdown()
            self._cluster = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def leftover(folder: Path) -> list[int]:
    """Processes that still have a cluster's folder in their command line; for tests."""
    found = subprocess.run(
        ["pgrep", "-f", str(folder)], capture_output=True, text=True, check=False
    ).stdout.split()
    return [int(pid) for pid in found if int(pid) != os.getpid()] if sys.platform == "linux" else []
