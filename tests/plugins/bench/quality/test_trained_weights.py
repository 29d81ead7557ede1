"""The committed checkpoint: what is in it, and that it is worth what was recorded when it was trained.

Nothing is trained here. Losses are those of the plain form in float32; code comes from the standard library
of the Python that runs, which differs a little between versions.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from tests.plugins.bench.quality.recorded import FILE, measure
from vllm_deepinfer.checkpoint.config import V41Config
from vllm_deepinfer.checkpoint.files import read_headers
from vllm_deepinfer.checkpoint.trained import FOLDER
from vllm_deepinfer.lessons.vocabulary import tokenizer

TOLERANCE = 0.02
"""Of a figure, relative: sums in another order, on another CPU."""
OF_CODE = 0.08
"""Of what is measured on code: held-out modules changed between Python 3.11 and 3.13."""

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="no checkpoint has been trained yet")


def config() -> V41Config:
    return V41Config.load(FOLDER)


def weights() -> list[Path]:
    return sorted(FOLDER.glob("*.safetensors"))


def test_it_is_small_enough_for_the_repository() -> None:
    size = sum(path.stat().st_size for path in weights())
    assert 1_000_000 < size <= 12_000_000
    parameters = 0
    for path in weights():
        for header in read_headers(path).values():
            count = 1
            for length in header.shape:
                count *= length
            parameters += count
    assert parameters <= 6_000_000


def test_every_mechanism_is_in_it() -> None:
    text = config().text_config
    assert text.num_hidden_layers >= 8
    assert set(text.compress_ratios[: text.num_hidden_layers]) == {0, 1, 2}
    assert len(text.kv_source_layer_ids) >= 2
    assert text.candidate_topk_blocks > 0 and text.candidate_source_layer_id in text.kv_source_layer_ids
    assert text.engram_layer_ids and text.hc_mult == 4 and text.n_routed_experts >= 8
    assert text.num_nextn_predict_layers >= 1 and text.dspark_block_size == 5
    assert 16 <= text.sliding_window <= 32


def test_its_tokenizer_is_that_of_the_lessons() -> None:
    ours = (FOLDER / "tokenizer.json").read_text(encoding="utf-8").strip()
    assert hashlib.sha256(ours.encode()).digest() == hashlib.sha256(tokenizer().to_str().encode()).digest()
    assert config().text_config.vocab_size == 2048


def test_it_is_worth_what_was_recorded() -> None:
    recorded = json.loads(FILE.read_text(encoding="utf-8"))
    found = measure(FOLDER)
    assert found.keys() == recorded.keys()
    for name, value in recorded.items():
        allowed = OF_CODE if name.endswith("code") else TOLERANCE
        assert found[name] == pytest.approx(value, rel=allowed, abs=0.01), name


def test_what_was_recorded_is_more_than_chance() -> None:
    """Guards the record itself: 2,048 tokens are 11 bits apart for a model that knows nothing."""
    recorded = json.loads(FILE.read_text(encoding="utf-8"))
    assert recorded["bits_code"] < 6
    assert recorded["bits_tools"] < 0.5
    assert recorded["likeliest_tools"] > 0.9
    assert recorded["accepted_length_json"] > 1.5
