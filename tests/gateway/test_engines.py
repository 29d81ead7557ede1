"""Engines by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.harness import DATA
from vllm_deepinfer.engine.simulated import SimulatedEngine
from vllm_deepinfer.errors import UserError
from vllm_deepinfer.gateway import engines


def test_the_simulated_engine_has_the_checkpoints_vocabulary() -> None:
    engine = engines.make_engine("simulated", DATA, ["--max-model-len", "100", "--max-num-seqs=7"])
    assert isinstance(engine, SimulatedEngine)
    config = engine.config
    assert (config.model, config.vocab_size, config.eos_token_id) == ("data", 512, 1)
    assert (config.max_model_len, config.max_num_seqs) == (100, 7)
    assert list(engine.info.eos_token_ids) == [1]


@pytest.mark.parametrize(
    "arguments", [["--max-model-len"], ["max-model-len", "3"], ["--max-model-len", "1e3x"]]
)
def test_arguments_that_make_no_sense(arguments: list[str]) -> None:
    with pytest.raises(UserError):
        engines.make_engine("simulated", DATA, arguments)


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"added_tokens": [], "model": {"vocab": {"a": 0}}}', '{"added_tokens": 3}']
)
def test_a_folder_without_a_usable_tokenizer(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match="is not a readable tokenizer"):
        engines.make_engine("simulated", tmp_path, [])


def test_others_come_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    class Point:
        name = "other"

        @staticmethod
        def load() -> Any:
            return lambda model, arguments: ("made", model, arguments)

    monkeypatch.setattr(engines, "entry_points", lambda group: [Point] if group == engines.GROUP else [])
    made: Any = engines.make_engine("other", DATA, ["--x"])
    assert made == ("made", DATA, ["--x"])
    with pytest.raises(UserError, match="choose one of other, simulated"):
        engines.make_engine("vllm", DATA, [])


def test_the_fixture_is_a_tokenizer_of_this_family() -> None:
    tokens = json.loads((DATA / "tokenizer.json").read_text())["added_tokens"]
    assert {"id": 1, "content": "<｜end▁of▁sentence｜>"}.items() <= next(
        t for t in tokens if t["id"] == 1
    ).items()
