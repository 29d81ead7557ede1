"""VllmEngine from the flags of `vllm serve`, for `vllm-deepinfer gateway --engine vllm`."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import NoReturn

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_deepinfer.errors import UserError
from vllm_deepinfer_plugins.engine.vllm_engine import VllmEngine
from vllm_deepinfer_plugins.forced import add_forced_tokens

REASONING_PARSER = "deepseek_v41"
KV_SPACE = "VLLM_CPU_KVCACHE_SPACE"
_MEMORY_FLAGS = (
    "--gpu-memory-utilization",
    "--gpu_memory_utilization",
    "--kv-cache-memory",
    "--num-gpu-blocks",
)

logger = logging.getLogger(__name__)


class _Parser(FlexibleArgumentParser):
    def error(self, message: str) -> NoReturn:  # argparse would print 250 lines of usage and exit
        raise UserError(f"--engine-args: {message}.")


def build(model: Path, arguments: list[str], *, wedge_after_s: float = 60.0) -> VllmEngine:
    """An engine that is not started. Raises: UserError for a flag that vLLM does not take.

    ``wedge_after_s``: work without a step for this long is reported as WEDGED.

    V4.1's reasoning parser is on unless another one is named: without one, vLLM cannot start a constraint
    after the reasoning.
    """
    parser = AsyncEngineArgs.add_cli_args(_Parser(prog="vllm-deepinfer gateway"))
    parser.set_defaults(reasoning_parser=REASONING_PARSER)
    parsed = parser.parse_args(["--model", str(model), *arguments])
    reserve_kv_space(arguments)
    args = AsyncEngineArgs.from_cli_args(parsed)
    add_forced_tokens(args)
    return VllmEngine(args, wedge_after_s=wedge_after_s)


def reserve_kv_space(arguments: list[str]) -> None:
    """On a CPU take a quarter of the free memory for KV, at least 1 GiB, unless the user has said how much.

    vLLM's own default is 92 % of the machine's memory, and it does not start where less than that is free.
    """
    told = any(argument.startswith(_MEMORY_FLAGS) for argument in arguments)
    if not current_platform.is_cpu() or told or KV_SPACE in os.environ:
        return
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 30
    os.environ[KV_SPACE] = str(max(free // 4, 1))
    logger.info("%s GiB of memory for KV; set %s for another amount.", os.environ[KV_SPACE], KV_SPACE)
