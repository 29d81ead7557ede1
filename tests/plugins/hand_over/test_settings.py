"""The settings are those that vLLM's config and our connector take."""

from __future__ import annotations

from typing import Any

import pytest

settings = pytest.importorskip("vllm_deepinfer_plugins.hand_over.settings")
config = pytest.importorskip("vllm.config")


@pytest.mark.parametrize(
    ("role", "theirs"), [("prefill", "kv_producer"), ("decode", "kv_consumer"), ("both", "kv_both")]
)
def test_vllm_takes_them(role: Any, theirs: str) -> None:
    made = config.KVTransferConfig(**settings.transfer_config(role, lease_s=7, fetch_timeout_s=3.0))
    assert made.kv_role == theirs and made.kv_load_failure_policy == "recompute"
    assert made.get_from_extra_config("kv_lease_duration", 0) == 7
    assert made.get_from_extra_config("fetch_timeout_s", 0) == 3.0
    assert made.has_connector("NixlConnector"), "vLLM fixes its configuration for that name"


def test_a_cpu_starts_no_threads() -> None:
    made = settings.transfer_config("both", cpu=True)
    extra = made["kv_connector_extra_config"]
    assert (made["kv_buffer_device"], extra["num_threads"], extra["idle_poll_s"]) == ("cpu", 0, 0.004)
    other = settings.transfer_config("both")
    assert "kv_buffer_device" not in other and "num_threads" not in other["kv_connector_extra_config"]


def test_the_connector_that_vllm_loads_is_ours() -> None:
    factory = pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.factory")
    made = config.KVTransferConfig(**settings.transfer_config("prefill"))
    loaded = factory.KVConnectorFactory.get_connector_class(made)
    assert loaded.__module__ == settings.MODULE
    assert factory.KVConnectorFactory.supports_hma_config(made)
