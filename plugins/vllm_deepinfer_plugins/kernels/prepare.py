"""Kernels before an engine starts; where there are none, portable PyTorch, counted and logged."""

from __future__ import annotations

from functools import cache

import torch
from prometheus_client import Counter
from vllm.logger import init_logger

from .build import BuildError, build
from .library import Kernels, load

logger = init_logger(__name__)


@cache
def fallbacks() -> Counter:
    """Engines that run without something that they were to have, by what it is."""
    return Counter("deepinfer_fallbacks", "Engines that run without a part that they were to have.", ["part"])


def prepare_kernels(*, wanted: bool) -> bool:
    """Compile the kernels, once per machine, in the process that reads an engine's config.

    If that fails, `/metrics` says so in ``deepinfer_fallbacks_total``, and the engine itself warns. Where
    oneDNN has no bfloat16 products, both is done here.

    Returns:
        Whether they are there.
    """
    counter = fallbacks().labels(part="native_kernels")
    products = fallbacks().labels(part="onednn_products")
    if not has_onednn_products():
        products.inc()
        logger.warning_once(
            "this CPU has no bfloat16 products of oneDNN (x86 needs AVX-512): what our kernels do not take "
            "runs on PyTorch's own, slower"
        )
    if not wanted:
        return False
    try:
        build()
    except BuildError:
        counter.inc()
        return False
    return True


@cache
def has_onednn_products() -> bool:
    """Whether vLLM's oneDNN multiplies in bfloat16: x86 without AVX-512 cannot, and raises if asked."""
    from vllm import _custom_ops

    there = _custom_ops._supports_onednn and torch.backends.mkldnn.is_available()
    return bool(there and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def load_or_warn() -> Kernels | None:
    """The kernels, turned on in this process; or None and one warning that says what is missing."""
    try:
        return load()
    except (BuildError, OSError) as error:
        logger.warning("DeepSeek-V4.1 runs without its CPU kernels, a few times slower: %s", error)
        return None
