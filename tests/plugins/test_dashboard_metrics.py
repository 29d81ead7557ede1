"""Contract: metrics of the dashboard's engine row are those that our loggers and vLLM's make."""

from __future__ import annotations

from pathlib import Path

import pytest
import vllm.v1.metrics.loggers as loggers
from prometheus_client import REGISTRY
from vllm_deepinfer_plugins.kernels.prepare import fallbacks
from vllm_deepinfer_plugins.scheduler.stat_logger import metrics

from tests.cluster.dashboard.queries_of import queries, selectors

NAMES = sorted({name for query in queries(engines=True) for name, _ in selectors(query)})
VLLM = Path(loggers.__file__).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("vllm:")])
def test_vllm_has_it(name: str) -> None:
    assert f'name="{name.removesuffix("_total")}"' in VLLM


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("deepinfer_")])
def test_we_have_it(name: str) -> None:
    metrics()
    fallbacks()
    base = name.removesuffix("_bucket").removesuffix("_total")
    assert base in {family.name for family in REGISTRY.collect()}
