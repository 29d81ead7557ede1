from __future__ import annotations

from pathlib import Path

import pytest

from vllm_deepinfer.checkpoint.command import _OPTION_OF
from vllm_deepinfer.checkpoint.config import TextConfig, V41Config
from vllm_deepinfer.checkpoint.verify import verify_headers
from vllm_deepinfer.cli import run

SMALL = ["--hidden", "32", "--experts", "2", "--top-k", "1", "--expert-width", "32", "--vocab", "300"]


def test_writes_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "model"
    assert run(["tiny-checkpoint", str(out), *SMALL]) == 0
    verify_headers(out, V41Config.load(out))
    printed = capsys.readouterr()
    assert printed.out.startswith(f"{out}: ")
    assert printed.out.endswith(" MB in 1 weight file\n")
    assert printed.err == ""


def test_every_option_arrives(tmp_path: Path) -> None:
    out = tmp_path / "model"
    options = {
        "--ratios": "0,2,2,1,1,1",
        "--kv-sources": "1,3",
        "--index-sources": "1,3,4",
        "--candidate-source": "3",
        "--engram-layers": "0,2",
        "--hidden": "64",
        "--heads": "2",
        "--head-dim": "64",
        "--experts": "4",
        "--top-k": "3",
        "--expert-width": "32",
        "--window": "8",
        "--vocab": "400",
        "--context-length": "2048",
        "--dspark-blocks": "2",
        "--encoding": "bf16",
        "--seed": "7",
        "--shard-mb": "0.1",
    }
    arguments = [part for option in options.items() for part in option]
    assert (
        run(["tiny-checkpoint", str(out), *arguments, "--set", "index_topk=5", "--set", "swiglu_limit=7.5"])
        == 0
    )
    config = V41Config.load(out)
    text = config.text_config
    assert config.dtype == "bfloat16"
    assert text.compress_ratios == (0, 2, 2, 1, 1, 1, 0, 0)
    assert (text.kv_source_layer_ids, text.index_source_layer_ids) == ((1, 3), (1, 3, 4))
    assert (text.candidate_source_layer_id, text.engram_layer_ids) == (3, (0, 2))
    assert (text.hidden_size, text.num_attention_heads, text.head_dim) == (64, 2, 64)
    assert (text.n_routed_experts, text.num_experts_per_tok, text.moe_intermediate_size) == (4, 3, 32)
    assert (text.sliding_window, text.vocab_size, text.max_position_embeddings) == (8, 400, 2048)
    assert (text.num_nextn_predict_layers, text.index_topk, text.swiglu_limit) == (2, 5, 7.5)
    assert len(list(out.glob("*.safetensors"))) > 5


def test_the_seed_arrives(tmp_path: Path) -> None:
    for name, seed in (("a", "0"), ("b", "0"), ("c", "1")):
        assert run(["tiny-checkpoint", str(tmp_path / name), *SMALL, "--layers", "1", "--seed", seed]) == 0
    first, second, third = (
        (tmp_path / name / "model-00001-of-00001.safetensors").read_bytes() for name in ("a", "b", "c")
    )
    assert first == second != third


def test_no_engram(tmp_path: Path) -> None:
    assert run(["tiny-checkpoint", str(tmp_path / "m"), *SMALL, "--layers", "2", "--engram-layers", ""]) == 0
    assert V41Config.load(tmp_path / "m").text_config.engram_layer_ids == ()


def test_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["tiny-checkpoint", str(tmp_path / "model"), *SMALL, "--layers", "1"]
    assert run(arguments) == 0
    assert run(arguments) == 2
    assert "is not empty: name a new folder, or add --force" in capsys.readouterr().err
    assert run([*arguments, "--force"]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--ratios 0,x", '--ratios is "0,x": write integers separated by commas, such as 0,2,1'),
        ("--kv-sources 1;2", '--kv-sources is "1;2": write integers'),
        ("--index-sources 1.5", '--index-sources is "1.5": write integers'),
        ("--engram-layers one", '--engram-layers is "one": write integers'),
        ("--encoding fp8", '--encoding is "fp8": write one of released, bf16, fp32'),
        ("--tokenizer real", '--tokenizer is "real": write one of small, released'),
        ("--seed -1", "--seed is -1: write 0 or more"),
        ("--layers 0", "--layers is 0: write 1 or more"),
        ("--dspark-blocks -1", "--dspark-blocks is -1: write 0 or more"),
        ("--shard-mb 0", "--shard-mb is 0.0: write a positive number"),
        ("--shard-mb nan", "--shard-mb is nan: write a positive number"),
        ("--shard-mb inf", "--shard-mb is inf: write a positive number"),
        ("--layers 100000000", "--layers is 100000000: write 1000 or less"),
        ("--dspark-blocks 100000000", "--dspark-blocks is 100000000: write 1000 or less"),
        (
            "--experts 100000000",
            "--experts (text_config.n_routed_experts) is 100000000 in each of 8 layers: write at most 25000",
        ),
        (
            "--set engram_n_heads=1000000",
            "text_config.engram_max_ngram_size 4 and engram_n_heads 1000000 make 3000000 hash columns",
        ),
        ("--set engram_vocab_size=0", "text_config.engram_vocab_size is 0: write a positive number"),
        ("--set index_topk", '--set is "index_topk": write FIELD=VALUE, such as index_topk=32'),
        ("--set =3", '--set is "=3": write FIELD=VALUE'),
        ("--set hiden_size=3", '"hiden_size" is no field of text_config: did you mean hidden_size?'),
        ("--set index_topk=many", "text_config.index_topk cannot be read: "),
        ("--hidden 0", "--hidden (text_config.hidden_size) is 0: write a positive number"),
        ("--heads 0", "--heads (text_config.num_attention_heads) is 0: "),
        ("--head-dim 0", "--head-dim (text_config.head_dim) is 0: "),
        (
            "--experts 1 --top-k 2",
            "--top-k (text_config.num_experts_per_tok) is 2: write at most n_routed_experts 1",
        ),
        ("--window -5", "--window (text_config.sliding_window) is -5: "),
        ("--vocab 100", "a vocabulary of 100 cannot hold the control tokens and all bytes: use "),
        ("--context-length 0", "--context-length (text_config.max_position_embeddings) is 0: "),
        (
            "--hidden 48 --encoding released",
            "--hidden (text_config.hidden_size) is 48: write a multiple of 32, ",
        ),
        ("--ratios 0,1 --layers 3", "--ratios (text_config.compress_ratios) has 2 entries for 3 layers: "),
        ("--ratios 0,-1", "--ratios (text_config.compress_ratios)[1] is -1: "),
        (
            "--ratios 2,1 --kv-sources 0",
            "--ratios (text_config.compress_ratios)[1] is 1, but the layer reads the cache",
        ),
        (
            "--ratios 1,1 --candidate-source 1",
            "--candidate-source (text_config.candidate_source_layer_id) is 1, which",
        ),
        ("--engram-layers 99", "--engram-layers (text_config.engram_layer_ids) lists layer 99: "),
        ("--hidden ten", "Invalid value for '--hidden': "),
        ("--nothing", "No such option: --nothing"),
    ],
)
def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: str, message: str) -> None:
    assert run(["tiny-checkpoint", str(tmp_path / "model"), *arguments.split(" ")]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"vllm-deepinfer: {message}")
    assert printed.err.count("\n") == 1
    assert printed.out == ""
    assert not (tmp_path / "model").exists()


def test_no_folder_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tiny-checkpoint"]) == 2
    assert "Missing argument 'OUT'" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tiny-checkpoint", "/proc/nowhere/model", *SMALL, "--layers", "1"]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("vllm-deepinfer: /proc")
    assert printed.count("\n") == 1


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tiny-checkpoint", "--help"]) == 0
    printed = capsys.readouterr().out
    for option in (*_OPTION_OF.values(), "--set", "--force", "--encoding", "--seed"):
        assert option in printed, option
    assert printed.count("default: ") >= 19  # derived defaults too, which markup would swallow in brackets


def test_options_are_matched_to_fields_that_exist() -> None:
    assert set(_OPTION_OF) <= set(TextConfig.model_fields)
