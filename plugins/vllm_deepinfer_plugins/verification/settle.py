"""What may be said about verification, settled before an engine's weights are read."""

from __future__ import annotations

from typing import Any

from vllm_deepinfer.errors import UserError

from ..settings import Settings
from .adaptive import AdaptiveVerification
from .saved import calibration_of


class VerificationError(UserError):
    """A setting of verification that nobody would follow."""


def settle(vllm_config: Any) -> None:
    """Refuse settings that nobody would follow, and a calibration that fits neither target nor drafter.

    Raises:
        VerificationError, UserError: One sentence that names the setting and what to write.
    """
    settings = Settings.read(vllm_config.additional_config)
    asked = "calibration_file" if settings.calibration_file is not None else "verification"
    if asked not in settings.model_fields_set:
        return
    here = f'additional_config["deepinfer"]["{asked}"] is {getattr(settings, asked)}'
    if settings.verification == "everything":
        if asked == "calibration_file":
            raise VerificationError(
                f"{here}, but verification is everything, which looks at no confidence: leave one of them out"
            )
        return
    speculative = vllm_config.speculative_config
    if speculative is None:
        raise VerificationError(
            f"{here}, but nothing is drafted: write --speculative-config, or leave it out"
        )
    if not _chooses(vllm_config.scheduler_config):
        raise VerificationError(
            f"{here}, but --scheduler-cls is {vllm_config.scheduler_config.scheduler_cls}, which verifies "
            "every draft: write vllm_deepinfer_plugins.verification.scheduler.VerifyingScheduler, or leave "
            "the setting out"
        )
    calibration_of(vllm_config, settings, speculative.num_speculative_tokens)


def _chooses(scheduler_config: Any) -> bool:
    cls = scheduler_config.get_scheduler_cls()
    return isinstance(cls, type) and issubclass(cls, AdaptiveVerification)
