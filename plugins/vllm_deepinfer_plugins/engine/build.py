"""VllmEngine from the flags of `vllm serve`, for `vllm-deepinfer gateway --engine vllm`."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_deepinfer.errors import UserError
from vllm_deepinfer_plugins.engine.vllm_engine import VllmEngine

REASONING_PARSER = "deepseek_v41"


class _Parser(FlexibleArgumentParser):
    def error(self, message: str) -> NoReturn:  # argparse would print 250 lines of usage and exit
        raise UserError(f"--engine-args: {message}.")


def build(model: Path, arguments: list[str]) -> VllmEngine:
    """An engine that is not started. Raises: UserError for a flag that vLLM does not take.

    V4.1's reasoning parser is on unless another one is named: without one, vLLM cannot start a constraint
    after the reasoning.
    """
    parser = AsyncEngineArgs.add_cli_args(_Parser(prog="vllm-deepinfer gateway"))
    parser.set_defaults(reasoning_parser=REASONING_PARSER)
    parsed = parser.parse_args(["--model", str(model), *arguments])
    return VllmEngine(AsyncEngineArgs.from_cli_args(parsed))
