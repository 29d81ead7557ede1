"""The calibration that an engine starts from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm_deepinfer.errors import UserError
from vllm_deepinfer.policy.calibration import Calibration, ForeignCalibration, loads

from ..settings import Settings


def names_of(vllm_config: Any) -> tuple[str, str]:
    """Target and drafter, as a calibration file names them."""
    speculative = vllm_config.speculative_config
    return str(vllm_config.model_config.model), f"{speculative.method}:{speculative.model}"


def calibration_of(vllm_config: Any, settings: Settings, positions: int) -> Calibration | None:
    """The one that `calibration_file` holds; None without that setting.

    Raises:
        UserError: There is no such file, or it is another model's.
    """
    if settings.calibration_file is None:
        return None
    here = f'additional_config["deepinfer"]["calibration_file"] is {settings.calibration_file}'
    try:
        found = loads(Path(settings.calibration_file).read_text(), *names_of(vllm_config))
    except (OSError, ForeignCalibration) as error:
        raise UserError(f"{here}, which cannot be used: {error}") from error
    if len(found.temperatures) != positions:
        raise UserError(
            f"{here}, which is for {len(found.temperatures)} drafts, and num_speculative_tokens is "
            f"{positions}: fit another"
        )
    return found
