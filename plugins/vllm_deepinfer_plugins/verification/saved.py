"""The calibration that an engine starts from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm_deepinfer.errors import UserError
from vllm_deepinfer.policy.calibration import Calibration, ForeignCalibration, loads

from ..settings import Settings


def names_of(vllm_config: Any) -> tuple[str, str]:
    """Target and drafter, as a calibration file names them.

    A checkpoint folder by a digest of its weights, wherever it lies: one that was trained further is another.
    """
    speculative = vllm_config.speculative_config
    target, drafter = str(vllm_config.model_config.model), str(speculative.model)
    return _name(target), f"{speculative.method}:{_name(drafter)}"


def _name(model: str) -> str:
    from ..kv_connector.fingerprint import checkpoint_digest  # its package is large, and seldom needed here

    folder = Path(model)
    if not (folder / "config.json").is_file():
        return model  # of a hub, or a class
    return f"sha256:{checkpoint_digest(folder)[:32]}"


def calibration_of(vllm_config: Any, settings: Settings, positions: int) -> Calibration | None:
    """The one that `calibration_file` holds; None without that setting.

    Raises:
        UserError: There is no such file, or it is another model's.
    """
    if settings.calibration_file is None:
        return None
    here = f'additional_config["deepinfer"]["calibration_file"] is {settings.calibration_file}'
    try:
        text = Path(settings.calibration_file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UserError(
            f"{here}, which cannot be read ({reason}): write the path of a calibration, or leave it out"
        ) from error
    try:
        found = loads(text, *names_of(vllm_config))
    except ForeignCalibration as error:
        raise UserError(f"{here}, which cannot be used: {error}") from error
    if len(found.temperatures) != positions:
        raise UserError(
            f"{here}, which is for {len(found.temperatures)} drafts, and num_speculative_tokens is "
            f"{positions}: fit another"
        )
    return found
