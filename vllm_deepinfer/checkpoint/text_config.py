"""The text_config of a released DeepSeek-V4.1 config.json, field by field."""

from __future__ import annotations

from typing import Any

from pydantic import (
    BaseModel,
    ConfigDict,
    StrictBool,
    StrictFloat,
    StrictInt,
    ValidationError,
    model_validator,
)

from .checks import check_sizes
from .errors import ConfigError
from .schedule import LayerPlan, check_schedule, plan_layers


class TextConfig(BaseModel):
    """The backbone, Engram and the DSpark drafter under their released names.

    Sizes are required. A field with a default is one that a config may leave out: either the architecture
    fixes its value, or 0 and the empty list turn the mechanism off. Unknown keys are ignored, because
    checkpoints carry metadata of other programs.

    Raises:
        ConfigError: The fields describe no model that can run; one sentence names the field and what to
            write.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", hide_input_in_errors=True)

    vocab_size: StrictInt
    hidden_size: StrictInt
    moe_intermediate_size: StrictInt
    num_hidden_layers: StrictInt
    num_attention_heads: StrictInt
    num_key_value_heads: StrictInt = 1
    head_dim: StrictInt
    qk_rope_head_dim: StrictInt
    q_lora_rank: StrictInt
    o_lora_rank: StrictInt
    o_groups: StrictInt
    hidden_act: str = "silu"
    swiglu_limit: StrictFloat = 10.0
    rms_norm_eps: StrictFloat = 1e-20
    attention_bias: StrictBool = False
    attention_dropout: StrictFloat = 0.0
    initializer_range: StrictFloat = 0.02
    tie_word_embeddings: StrictBool = False
    max_position_embeddings: StrictInt
    rope_theta: StrictFloat = 10000.0
    rope_scaling: dict[str, Any] | None = None

    n_routed_experts: StrictInt
    n_shared_experts: StrictInt = 1
    num_experts_per_tok: StrictInt
    scoring_func: str = "sqrtsoftplus"
    topk_method: str = "noaux_tc"
    norm_topk_prob: StrictBool = True
    routed_scaling_factor: StrictFloat = 1.5

    sliding_window: StrictInt
    compress_ratios: tuple[StrictInt, ...]
    compress_rope_theta: StrictFloat = 160000.0
    kv_source_layer_ids: tuple[StrictInt, ...] = ()
    index_source_layer_ids: tuple[StrictInt, ...] = ()
    index_n_heads: StrictInt
    index_head_dim: StrictInt
    index_topk: StrictInt
    candidate_source_layer_id: StrictInt = -1
    candidate_topk_blocks: StrictInt = 0
    candidate_block_size: StrictInt = 0

    hc_mult: StrictInt = 4
    hc_sinkhorn_iters: StrictInt = 20
    hc_eps: StrictFloat = 1e-6

    engram_layer_ids: tuple[StrictInt, ...] = ()
    engram_num_embeddings: tuple[StrictInt, ...] = ()
    engram_max_ngram_size: StrictInt = 0
    engram_vocab_size: StrictInt = 0
    engram_n_heads: StrictInt = 0
    engram_head_dim: StrictInt = 0
    engram_pad_token_id: StrictInt = 2
    engram_compressed_vocab_size: StrictInt = 0

    num_nextn_predict_layers: StrictInt = 0
    dspark_block_size: StrictInt = 0
    dspark_noise_token_id: StrictInt = 0
    dspark_target_layer_ids: tuple[StrictInt, ...] = ()
    dspark_markov_rank: StrictInt = 0
    dspark_n_routed_experts: StrictInt = 0
    dspark_num_experts_per_tok: StrictInt = 0

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise one_sentence(error, "text_config") from None

    @model_validator(mode="before")
    @classmethod
    def _accept_rope_parameters(cls, fields: Any) -> Any:
        """Transformers 5 writes ``rope_parameters``, scaling and theta in one, for ``rope_scaling``."""
        if not isinstance(fields, dict) or not isinstance(fields.get("rope_parameters"), dict):
            return fields
        parameters = fields["rope_parameters"]
        main, compress = parameters.get("main"), parameters.get("compress")
        nested = isinstance(main, dict) and isinstance(compress, dict)
        scaling = dict(compress if nested else parameters)
        theta = dict(main if nested else parameters).get("rope_theta")
        scaling.pop("rope_theta", None)
        merged = dict(fields)
        if merged.get("rope_scaling") is None:
            merged["rope_scaling"] = scaling
        if theta is not None:
            merged.setdefault("rope_theta", theta)
        return merged

    @model_validator(mode="after")
    def _check(self) -> TextConfig:
        check_schedule(self)
        check_sizes(self)
        return self

    def schedule(self) -> tuple[LayerPlan, ...]:
        """What each of the ``num_hidden_layers`` layers owns and reads, in order."""
        return plan_layers(self)


def one_sentence(error: ValidationError, prefix: str) -> ConfigError:
    """The first finding of a validation error as one sentence under the field's full name."""
    first, more = error.errors()[0], error.error_count() - 1
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        return cause
    field = ".".join([prefix, *map(str, first["loc"])]).strip(".")
    others = f" (and {more} more field{'s' * (more > 1)})" if more else ""
    if first["type"] == "missing":
        return ConfigError(f"{field} is missing{others}: write it as the released config.json does")
    problem = first["msg"][0].lower() + first["msg"][1:]
    return ConfigError(f"{field} cannot be read{others}: {problem}")
