from __future__ import annotations

import json
from typing import Any

import pytest

from vllm_deepinfer.checkpoint.tensors import Entry, Kind, entries, quantised_shapes, scale_name

from .samples import DATA, FIXTURES, config, text_config

# Names and shapes of every tensor of the golden checkpoints, as another implementation wrote them.
GOLDEN: dict[str, dict[str, list[int]]] = json.loads((DATA / "fixture_tensors.json").read_text())["folders"]


def layout(name: str = "tiny-dspark", **changes: Any) -> dict[str, Entry]:
    return dict(entries(text_config(name, **changes)))


@pytest.mark.parametrize("name", FIXTURES)
def test_every_tensor_of_the_golden_checkpoints(name: str) -> None:
    shapes = {tensor: list(entry.shape) for tensor, entry in layout(name).items()}
    assert shapes == GOLDEN["tiny" if name == "tiny-no-candidates" else name]


def test_no_tensor_twice() -> None:
    names = [name for name, _ in entries(text_config("tiny-dspark"))]
    assert len(names) == len(set(names)) == 498


@pytest.mark.parametrize(
    ("name", "shape", "kind"),
    [
        # Stored shapes that engines report from the released shard headers, before packing.
        ("embed.weight", (129280, 5120), Kind.PLAIN),
        ("head.weight", (129280, 5120), Kind.PLAIN),
        ("layers.0.attn.wq_a.weight", (1280, 5120), Kind.DENSE),
        ("layers.0.attn.wq_b.weight", (32768, 1280), Kind.DENSE),
        ("layers.0.attn.wkv.weight", (512, 5120), Kind.DENSE),
        ("layers.0.attn.wo_a.weight", (8192, 4096), Kind.DENSE),
        ("layers.0.attn.wo_b.weight", (5120, 8192), Kind.DENSE),
        ("layers.0.attn.attn_sink", (64,), Kind.EXACT),
        ("layers.2.attn.compressor.wgate.weight", (512, 5120), Kind.PLAIN),
        ("layers.20.attn.compressor.wkv.weight", (512, 5120), Kind.PLAIN),
        ("layers.20.attn.indexer.wk.weight", (128, 512), Kind.PLAIN),
        ("layers.24.attn.indexer.wq_b.weight", (4096, 1280), Kind.DENSE),
        ("layers.24.attn.indexer.weights_proj.weight", (32, 5120), Kind.PLAIN),
        ("layers.39.ffn.experts.383.w1.weight", (2304, 5120), Kind.EXPERT),
        ("layers.39.ffn.experts.383.w2.weight", (5120, 2304), Kind.EXPERT),
        ("layers.39.ffn.shared_experts.w3.weight", (2304, 5120), Kind.DENSE),
        ("layers.39.ffn.gate.bias_vl", (384,), Kind.EXACT),
        ("layers.5.hc_attn_fn", (24, 20480), Kind.EXACT),
        ("layers.1.engram.embed.weight", (384006168, 256), Kind.ROWS),
        ("layers.14.engram.wkv.weight", (25600, 6144), Kind.DENSE),
        ("mtp.0.main_proj.weight", (5120, 15360), Kind.DENSE),
        ("mtp.2.ffn.experts.127.w3.weight", (2304, 5120), Kind.EXPERT),
        ("mtp.2.markov_head.head.weight", (129280, 256), Kind.PLAIN),
        ("mtp.2.confidence_head.proj.weight", (1, 5376), Kind.PLAIN),
    ],
)
def test_the_release(name: str, shape: tuple[int, ...], kind: Kind) -> None:
    entry = RELEASED[name]
    assert (entry.shape, entry.kind) == (shape, kind)


RELEASED = dict(entries(text_config("released")))


def test_parameters_of_the_release() -> None:
    """The report counts 552 B parameters and 196 B of Engram beside them."""
    sizes = dict.fromkeys(("engram", "mtp", "rest"), 0)
    for name, entry in RELEASED.items():
        size = 1
        for length in entry.shape:
            size *= length
        sizes["engram" if ".engram.embed" in name else "mtp" if name.startswith("mtp.") else "rest"] += size
    assert round(sizes["engram"] / 1e9, 1) == 196.6
    assert round(sizes["rest"] / 1e9) == 552


def test_only_kv_sources_own_a_compressor_and_only_ratios_above_one_gate() -> None:
    parts = {name for name in RELEASED if ".compressor." in name}
    assert {int(name.split(".")[1]) for name in parts} == {2, 8, 14, 20}
    assert {int(name.split(".")[1]) for name in parts if ".wgate." in name} == {2, 8, 14}


def test_only_index_sources_own_an_indexer_and_only_kv_sources_its_keys() -> None:
    parts = {name for name in RELEASED if ".indexer." in name}
    assert {int(name.split(".")[1]) for name in parts} == {2, 8, 14, 20, 24, 28, 32, 36}
    assert {int(name.split(".")[1]) for name in parts if ".wk." in name} == {2, 8, 14, 20}


def test_a_prefix_has_the_tables_of_its_own_layers_alone() -> None:
    cut = layout("released", num_hidden_layers=9, num_nextn_predict_layers=0)
    assert not any(name.startswith(("layers.9.", "mtp.")) for name in cut)
    assert [name for name in cut if name.endswith("engram.embed.weight")] == ["layers.1.engram.embed.weight"]


def test_a_single_dspark_block_has_both_ends() -> None:
    names = {name for name in layout(num_nextn_predict_layers=1) if name.startswith("mtp.")}
    assert {name.split(".")[1] for name in names} == {"0"}
    assert {"mtp.0.main_proj.weight", "mtp.0.norm.weight", "mtp.0.markov_head.embed.weight"} <= names


def test_only_the_confidence_head_is_optional() -> None:
    optional = [name for name, entry in layout().items() if entry.optional]
    assert optional == ["mtp.2.confidence_head.proj.weight"]


def test_a_whole_config_and_its_text_config_are_alike() -> None:
    from vllm_deepinfer.checkpoint.config import V41Config

    assert dict(entries(V41Config.from_dict(config()))) == layout()


@pytest.mark.parametrize(
    ("entry", "weight", "scale"),
    [
        (Entry((5120, 15360), Kind.DENSE), (5120, 15360), (160, 480)),
        (Entry((33, 65), Kind.DENSE), (33, 65), (2, 3)),
        (Entry((2304, 5120), Kind.EXPERT), (2304, 2560), (2304, 160)),
        (Entry((5120, 2304), Kind.EXPERT), (5120, 1152), (5120, 72)),
        (Entry((384006168, 256), Kind.ROWS), (384006168, 256), (384006168, 8)),
    ],
)
def test_stored_shapes(entry: Entry, weight: tuple[int, int], scale: tuple[int, int]) -> None:
    assert quantised_shapes(entry) == (weight, scale)


def test_names_of_scales() -> None:
    assert scale_name("layers.1.engram.embed.weight") == "layers.1.engram.embed.scale"
    assert scale_name("mtp.0.main_proj.weight") == "mtp.0.main_proj.scale"


def test_what_the_release_quantises() -> None:
    import re

    pattern = re.compile(
        r"(layers|mtp)\.\d+\.(attn\.(wq_a|wq_b|wkv|wo_a|wo_b|indexer\.wq_b)|main_proj|engram\.(embed|wkv)"
        r"|ffn\.(shared_experts|experts\.\d+)\.w[123])\.weight"
    )
    assert {name for name, entry in RELEASED.items() if entry.quantisable} == {
        name for name in RELEASED if pattern.fullmatch(name)
    }
