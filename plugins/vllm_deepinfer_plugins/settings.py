"""What `--additional-config '{"deepinfer": {...}}'` may say: an unknown key is an error."""

from __future__ import annotations

import difflib
import os
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictStr, ValidationError

from vllm_deepinfer.errors import UserError


class SettingsError(UserError):
    """A key or value under ``deepinfer`` in additional_config that nobody can act on."""


Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]


class Settings(BaseModel):
    """The plugin's settings.

    Attributes:
        portable_model: Use this project's DeepSeek-V4.1 class even where vLLM has its own (CUDA, ROCm).
        batch_invariant: A token's bits depend on its own history alone: not on the batch, the chunks, the
            prefix cache or the block size. None follows vLLM's VLLM_BATCH_INVARIANT.
        itl_target_ms: Time-budget scheduler: a token of a running request should follow the one before it
            within this many milliseconds, at `itl_percentile`.
        itl_percentile: Which percentile of all inter-token latencies the target is for.
        step_budget_ms: Instead of itl_target_ms: what a step may be predicted to take, uncorrected.
        prefill_order: Who goes first: the shortest, with ageing; first come first served; priority.
        prefill_tile: A cut step has a multiple of this many rows, decodes included: what kernels compute at
            once, or a graph holds. None: 32 on a CPU, 128 elsewhere.
        step_cost_file: Where the fitted cost model is kept. None: in vLLM's cache folder.
        native_kernels: Compile the CPU's bfloat16 kernels with the machine's C compiler and use them.
        encoder_replay: Window KV leaves the prefix cache and is computed again after a hit. None: on where it
            can be, unless batch-invariant mode is or --no-swa-bounded-replay was given.
        decoder_replay: Layers behind the last KV source compute a prompt's last rows only. None: where
            encoder_replay is on, unless batch-invariant mode is.
        window_tier_mib: Host memory for window KV of prefixes that may be hit again; 0: none.
        window_tier_ttl_s: How long such window KV is kept.
        verification: With speculation: verify the drafts that are worth their time, or all of them.
        calibration_file: Of draft confidences, `policy.calibration` as JSON. None: learned anew.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    portable_model: StrictBool = False
    batch_invariant: StrictBool | None = None
    native_kernels: StrictBool = True
    encoder_replay: StrictBool | None = None
    decoder_replay: StrictBool | None = None
    window_tier_mib: Annotated[int, Field(strict=True, ge=0)] = 256
    window_tier_ttl_s: Positive = 300.0
    verification: Literal["adaptive", "everything"] = "adaptive"
    calibration_file: Annotated[StrictStr, Field(min_length=1)] | None = None
    itl_target_ms: Positive | None = None
    itl_percentile: Annotated[Positive, Field(lt=100)] = 99.0
    step_budget_ms: Positive | None = None
    prefill_order: Literal["shortest", "fcfs", "priority"] = "shortest"
    prefill_tile: Annotated[int, Field(strict=True, ge=1, le=8192)] | None = None
    step_cost_file: Annotated[StrictStr, Field(min_length=1)] | None = None

    @classmethod
    def read(cls, additional_config: Any) -> Settings:
        """The ``deepinfer`` part of vLLM's additional_config.

        Raises:
            SettingsError: One sentence about the first key or value that is wrong.
        """
        if isinstance(additional_config, dict):
            _check_outside(additional_config, list(cls.model_fields))
        part = additional_config.get("deepinfer", {}) if isinstance(additional_config, dict) else {}
        if not isinstance(part, dict):
            raise SettingsError(f'additional_config["deepinfer"] is {part!r}: write an object such as {{}}')
        try:
            return cls(**part)
        except ValidationError as error:
            raise SettingsError(_sentence(error, list(cls.model_fields))) from None

    @property
    def invariant(self) -> bool:
        """Whether batch-invariant mode is on, by this setting or by vLLM's environment variable."""
        if self.batch_invariant is not None:
            return self.batch_invariant
        return os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0")


def _check_outside(config: dict[Any, Any], keys: list[str]) -> None:
    """Other keys belong to others, unless they look like ours: nobody would read the setting."""
    for key in config:
        if key in keys:
            raise SettingsError(
                f'additional_config has {key} outside "deepinfer": write {{"deepinfer": {{"{key}": ...}}}}'
            )
        if key != "deepinfer" and difflib.get_close_matches(str(key).lower(), ["deepinfer"], cutoff=0.75):
            raise SettingsError(f'additional_config has the unknown key {key}: did you mean "deepinfer"?')


def _sentence(error: ValidationError, keys: list[str]) -> str:
    first = error.errors()[0]
    key = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(key, keys, n=1)
        hint = f"did you mean {near[0]}?" if near else f"the keys are {', '.join(keys)}"
        return f'additional_config["deepinfer"] has the unknown key {key}: {hint}'
    problem = first["msg"][0].lower() + first["msg"][1:]
    return f'additional_config["deepinfer"]["{key}"] is {first["input"]!r}: {problem}'
