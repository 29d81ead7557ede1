from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_deepinfer.checkpoint.config import ConfigError, TextConfig, V41Config
from vllm_deepinfer.errors import UserError

from .samples import DATA, FIXTURES, config, sentence, text


@pytest.mark.parametrize("name", [*FIXTURES, "released"])
def test_loads_the_file(name: str) -> None:
    loaded = V41Config.load(DATA / f"{name}.json")
    fields = config(name)
    assert loaded.architectures == ("DeepseekV41ForCausalLM",)
    assert loaded.dtype == fields["dtype"]
    assert loaded.image_token_id == fields["image_token_id"]
    assert loaded.vision_config.num_hidden_layers == fields["vision_config"]["num_hidden_layers"]
    assert loaded.quantization_config == fields.get("quantization_config")


@pytest.mark.parametrize("name", [*FIXTURES, "released"])
def test_every_released_field_arrives_unchanged(name: str) -> None:
    loaded = V41Config.load(DATA / f"{name}.json").text_config.model_dump(mode="json")
    wanted = text(name, model_type=..., use_cache=...)  # neither changes what is computed
    assert {field: loaded[field] for field in wanted} == wanted


def test_loads_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config("tiny")))
    assert V41Config.load(str(tmp_path)) == V41Config.load(DATA / "tiny.json")


@pytest.mark.parametrize("name", [*FIXTURES, "released"])
def test_a_flat_object_is_the_same_config(name: str) -> None:
    """vLLM's config class puts the text fields at the top and the vision fields under vision_*."""
    fields = config(name)
    nested = fields.pop("text_config")
    vision = fields.pop("vision_config")
    scaling = nested.pop("rope_scaling") | {"rope_theta": nested["rope_theta"]}
    flat = nested | fields | {"rope_parameters": scaling, "vision_n_layers": vision["num_hidden_layers"]}
    loaded, expected = V41Config.from_dict(flat), V41Config.load(DATA / f"{name}.json")
    assert loaded.text_config == expected.text_config
    assert loaded.quantization_config == expected.quantization_config
    assert loaded.vision_config.num_hidden_layers == vision["num_hidden_layers"]


def test_rope_parameters_give_theta_where_it_stands_nowhere_else() -> None:
    scaling = {**text()["rope_scaling"], "rope_theta": 5000.0}
    loaded = TextConfig(**text(rope_scaling=..., rope_theta=..., rope_parameters=scaling))
    assert loaded.rope_theta == 5000.0
    assert loaded.rope_scaling == text()["rope_scaling"]


def test_rope_parameters_per_kind_of_layer() -> None:
    both = {
        "main": {"rope_type": "default", "rope_theta": 7000.0},
        "compress": {**text()["rope_scaling"], "rope_theta": 1.6e5},
    }
    loaded = TextConfig(**text(rope_scaling=..., rope_theta=..., rope_parameters=both))
    assert loaded.rope_theta == 7000.0
    assert loaded.rope_scaling == text()["rope_scaling"]


def test_rope_scaling_outranks_rope_parameters() -> None:
    loaded = TextConfig(**text(rope_parameters={"rope_type": "default"}))
    assert loaded.rope_scaling == text()["rope_scaling"]


def test_defaults_are_those_of_the_architecture() -> None:
    optional = dict.fromkeys(
        ("rms_norm_eps", "hc_eps", "hc_mult", "hc_sinkhorn_iters", "routed_scaling_factor", "swiglu_limit"),
        ...,
    )
    loaded = TextConfig(**text("released", **optional))
    assert loaded == TextConfig(**text("released"))


def test_unknown_keys_are_ignored() -> None:
    assert TextConfig(**text(), some_metadata="x") == TextConfig(**text())
    assert V41Config.from_dict(config() | {"transformers_version": "9"}) == V41Config.from_dict(config())


@pytest.mark.parametrize(
    ("place", "dtype", "expected"),
    [
        ("dtype", "float32", "float32"),
        ("torch_dtype", "torch.float16", "float16"),
        ("dtype", None, "bfloat16"),
    ],
)
def test_dtype(place: str, dtype: str | None, expected: str) -> None:
    fields = config()
    del fields["dtype"]
    assert V41Config.from_dict(fields | {place: dtype}).dtype == expected


def refused(fields: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        V41Config.from_dict(fields)
    return sentence(caught.value)


@pytest.mark.parametrize(
    "field", ["vocab_size", "hidden_size", "compress_ratios", "index_topk", "sliding_window"]
)
def test_a_missing_size(field: str) -> None:
    fields = config()
    del fields["text_config"][field]
    assert refused(fields) == f"text_config.{field} is missing: write it as the released config.json does"


def test_several_missing_sizes_are_counted() -> None:
    fields = config()
    for field in ("vocab_size", "head_dim", "o_groups"):
        del fields["text_config"][field]
    assert refused(fields).startswith("text_config.vocab_size is missing (and 2 more fields): ")


@pytest.mark.parametrize("value", ["64", 64.0, True, None, [64]])
def test_a_size_is_an_integer(value: Any) -> None:
    fields = config()
    fields["text_config"]["hidden_size"] = value
    assert refused(fields).startswith(
        "text_config.hidden_size cannot be read: input should be a valid integer"
    )


def test_a_list_holds_integers() -> None:
    fields = config()
    fields["text_config"]["kv_source_layer_ids"] = [2, "4"]
    assert refused(fields).startswith("text_config.kv_source_layer_ids.1 cannot be read: ")


def test_a_field_of_the_whole_config() -> None:
    assert refused(config() | {"bos_token_id": "zero"}).startswith("bos_token_id cannot be read: ")


def test_another_model() -> None:
    assert refused(config() | {"model_type": "qwen3"}).startswith(
        'model_type is "qwen3": name a DeepSeek-V4.1'
    )


def test_tied_embeddings_at_the_top() -> None:
    assert refused(config() | {"tie_word_embeddings": True}).startswith(
        "text_config.tie_word_embeddings is true"
    )


def test_text_config_of_another_type() -> None:
    assert refused(config() | {"text_config": [1]}).startswith("text_config is no JSON object: ")


@pytest.mark.parametrize(
    ("content", "middle"),
    [(b"{", "is no JSON"), (b"[]", "holds no JSON object"), (b"\xff\xfe", "is no JSON")],
)
def test_a_file_that_is_no_config(tmp_path: Path, content: bytes, middle: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        V41Config.load(tmp_path)
    assert sentence(caught.value).startswith(f"{tmp_path / 'config.json'} {middle}")


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        V41Config.load(tmp_path / "nowhere")
    assert sentence(caught.value).startswith(
        f"{tmp_path / 'nowhere'} cannot be read (No such file or directory): "
    )


def test_the_command_line_shows_the_sentence_alone() -> None:
    assert issubclass(ConfigError, UserError)


def test_configs_do_not_change() -> None:
    loaded = V41Config.from_dict(config())
    with pytest.raises(ValueError, match="frozen"):
        loaded.text_config.vocab_size = 1  # type: ignore[misc]
