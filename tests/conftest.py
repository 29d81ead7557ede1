"""Settings of every test process and of the engines that tests start."""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import HealthCheck, settings

# On a busy machine any example can take long to make or to try, which says nothing about the code.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

CACHE = Path(__file__).parents[1] / ".cache"

SETTINGS = {
    "HF_HUB_OFFLINE": "1",  # a test that wants a download is wrong
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; the default takes half of the machine's memory
    "VLLM_CACHE_ROOT": str(CACHE / "vllm"),
    "VLLM_CONFIG_ROOT": str(CACHE / "vllm"),
}

# At import, before any test module can import vLLM: it reads some of them once.
for name, value in SETTINGS.items():
    os.environ.setdefault(name, value)
