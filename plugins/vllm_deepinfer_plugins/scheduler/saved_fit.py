"""Where a fitted step cost is kept between runs, and what it must have been fitted on to be taken again."""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path
from typing import Any

from vllm_deepinfer.policy.step_cost import StepCost
from vllm_deepinfer.step_cost_text import ForeignFit, dumps, loads

from ..settings import Settings

logger = logging.getLogger(__name__)


def fingerprint_of(vllm_config: Any) -> dict[str, str]:
    """Model, dtype, hardware, replays and vLLM version: what coefficients depend on."""
    from vllm import __version__
    from vllm.platforms import current_platform

    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    shape = hashlib.sha256(model.hf_config.to_json_string().encode()).hexdigest()
    # Settled by now: a prompt's tokens cost half as much where layers are left out of most of them.
    trims = Settings.read(getattr(vllm_config, "additional_config", None)).decoder_replay is True
    return {
        "model": str(model.model),
        "config": shape[:16],
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "hardware": _cpu() if current_platform.is_cpu() else current_platform.get_device_name(),
        "parallel": f"{parallel.tensor_parallel_size}x{parallel.pipeline_parallel_size}",
        "enforce_eager": str(model.enforce_eager),
        "decoder_replay": str(trims),
        "vllm": __version__,
    }


def default_path(fingerprint: dict[str, str]) -> Path:
    """A file of its own for every fingerprint, in vLLM's cache folder."""
    from vllm import envs

    name = hashlib.sha256(repr(sorted(fingerprint.items())).encode()).hexdigest()[:16]
    return Path(envs.VLLM_CACHE_ROOT) / "deepinfer" / "step_cost" / f"{name}.json"


def read(path: Path, fingerprint: dict[str, str]) -> StepCost | None:
    """The saved fit; None where there is none. One that is foreign or damaged is told of and ignored."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        logger.warning("The step cost in %s cannot be read (%s); a new one is fitted.", path, error)
        return None
    try:
        return loads(text, fingerprint)
    except ForeignFit as reason:
        logger.warning("The step cost in %s is ignored, since %s; a new one is fitted.", path, reason)
        return None


def write(path: Path, cost: StepCost, fingerprint: dict[str, str]) -> bool:
    """Replace the file by this fit: a reader sees the old one or the whole new one. False: it could not."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(dumps(cost, fingerprint))
        os.replace(temporary, path)
    except OSError as error:
        logger.warning(
            "The step cost could not be saved in %s (%s): it is fitted anew next time.", path, error
        )
        return False
    return True


def _cpu() -> str:
    from vllm_deepinfer.bench.machine import Machine

    machine = Machine.here()
    return f"{machine.cpu}, {machine.cores} cores, {os.environ.get('OMP_NUM_THREADS', 'all')} threads"
