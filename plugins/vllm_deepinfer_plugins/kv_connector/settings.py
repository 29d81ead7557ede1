"""The connector's settings: `kv_connector_extra_config`, checked when the engine starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_deepinfer.errors import UserError
from vllm_deepinfer.policy.admission import Mode, Rule
from vllm_deepinfer.policy.retention import DEFAULT_CLASSES, Retention, TrafficClass
from vllm_deepinfer.store.uri import size

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class ClassSettings(BaseModel):
    """A traffic class of the operator's own."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    code: Annotated[int, Field(ge=0, le=99)]
    ttl_s: Seconds
    share: Annotated[float, Field(ge=0, le=1)]


class StoreSettings(BaseModel):
    """What an operator may set; every field but `store` has a default that works."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    store: str = Field(description="address: a folder, memory:NAME, s3://BUCKET/PREFIX, or tiers with commas")
    run_tokens: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="tokens per object; None chooses from the bytes per token"
    )
    capacity: str | None = Field(
        default=None, description="of the store, such as 500GiB; None leaves it to expiry"
    )
    sweep_interval_s: Seconds = 60.0
    lookup_deadline_s: Seconds = 1.0
    load_deadline_s: Seconds = 30.0
    save_deadline_s: Seconds = 120.0
    hand_over: bool = Field(
        default=False, description="prompts of a prefill engine reach the decode engine through the store"
    )
    hand_over_wait_s: Seconds = Field(
        default=10.0, description="how long a prompt waits for what the prefill engine is still writing"
    )
    io_threads: Annotated[int, Field(ge=1, le=64)] = 4
    zstd_level: Annotated[int, Field(ge=1, le=22)] | None = None
    save_output: bool = Field(default=True, description="also runs that contain generated tokens")
    min_load_tokens: Annotated[int, Field(ge=1)] = Field(
        default=1, description="hits that save fewer tokens than this are not loaded"
    )
    max_pinned_fraction: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.25, description="of the KV blocks, held for saves in flight; beyond it saves wait"
    )
    admission: Mode = Mode.EXPECTED_REUSE
    min_prompt_tokens: Annotated[int, Field(ge=0)] = 0
    min_reuse: Annotated[float, Field(ge=0, le=1)] = 0.05
    default_class: str = "agent"
    classes: tuple[ClassSettings, ...] | None = None
    weights_id: str | None = Field(
        default=None, description="names the weights where no checkpoint folder does"
    )
    mode: Literal["read", "write", "both"] = "both"

    @property
    def capacity_bytes(self) -> int | None:
        """`capacity` in bytes."""
        return None if self.capacity is None else size(self.capacity, "the prefix store's capacity")

    @property
    def rule(self) -> Rule:
        """For `policy/admission`."""
        return Rule(self.admission, self.min_prompt_tokens, self.min_reuse)

    @property
    def retention(self) -> Retention:
        """For `policy/retention`."""
        own = self.classes
        classes = DEFAULT_CLASSES if own is None else tuple(TrafficClass(**c.model_dump()) for c in own)
        return Retention(classes, self.default_class)


def read_settings(extra: Mapping[str, Any], failure_policy: str) -> StoreSettings:
    """The settings of an engine.

    Raises:
        UserError: one sentence that names the key and what to write.
    """
    where = "kv_connector_extra_config of PrefixStoreConnector"
    if failure_policy != "recompute":
        raise UserError(
            'PrefixStoreConnector needs "kv_load_failure_policy": "recompute" in the kv-transfer-config, '
            f"not {failure_policy!r}: a load that fails would fail the request."
        )
    try:
        settings = StoreSettings.model_validate(dict(extra))
        settings.retention, settings.rule, settings.capacity_bytes  # noqa: B018  # each may refuse
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "?"
        known = ", ".join(sorted(StoreSettings.model_fields))
        hint = f"; known keys are {known}" if first["type"] == "extra_forbidden" else ""
        raise UserError(f"{where}: {key}: {first['msg']}{hint}.") from None
    except ValueError as error:
        raise UserError(f"{where}: {str(error).rstrip('.')}.") from None
    return settings
