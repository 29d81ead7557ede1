"""Every figure is in the report, measured or with its reason."""

from __future__ import annotations

import numpy as np
from vllm_deepinfer_plugins.bench.quality.command import Sitting
from vllm_deepinfer_plugins.bench.quality.drafts import Drafts
from vllm_deepinfer_plugins.bench.quality.figures import TARGETS, figures
from vllm_deepinfer_plugins.bench.quality.modes import FIRST, MODES, arguments
from vllm_deepinfer_plugins.bench.quality.perplexity import Loss, Replays
from vllm_deepinfer_plugins.bench.quality.plain import Plain
from vllm_deepinfer_plugins.settings import Settings

LOSSES = {FIRST: {"code": Loss(2.0, 1, 3), "prose": Loss(3.0, 1, 3)}}
SHARES: dict[str, dict[str, float | int]] = {
    "tool_calls": {"asked": 20, "well_formed": 0.95, "exact": 0.9},
    "retrieval": {"asked": 10, "well_formed": 1.0, "exact": 0.8},
}


def block(value: float) -> Drafts:
    return Drafts([np.array([[value, value]])], [np.array([[True, False]])], [np.array([[0.9, 0.1]])])


def test_everything_measured() -> None:
    cold = Loss(1.0, 10)
    plain = Plain(
        LOSSES,
        {"code": Replays(cold, cold, Loss(1.2, 10))},
        {"json": block(1.0), "code": block(0.5), "prose": block(0.0), "shuffled": block(0.0)},
    )
    found = {one.name: one for one in figures(plain, {FIRST: Sitting(SHARES)})}
    assert found.keys() >= TARGETS.keys()
    values = {name: found[name].value for name in TARGETS}
    assert values == {
        "bits_per_token_code": 2.0 / np.log(2),
        "tool_calls_well_formed": 0.95,
        "retrieval_exact": 0.8,
        "accepted_length_json": 3.0,
        "accepted_length_code": 1.75,
        "confidence_auc": 1.0,
        "replay_perplexity_ratio": 1.0,
        "decoder_replay_perplexity_ratio": np.exp(0.12) / np.exp(0.1),
    }
    assert {name for name in TARGETS if not found[name].holds} == {
        "retrieval_exact",
        "accepted_length_code",
        "decoder_replay_perplexity_ratio",
    }
    assert found["json_exact"].reason == "no question of it fits into the checkpoint's context"


def test_nothing_measured_has_reasons() -> None:
    plain = Plain(LOSSES, {"code": Replays()}, {})
    found = {one.name: one for one in figures(plain, {FIRST: Sitting({}, reason="the engine died")})}
    assert found["retrieval_exact"].reason == "the engine died"
    assert found["accepted_length_code"].reason == found["confidence_auc"].reason
    assert found["confidence_auc"].reason == "the checkpoint has no drafter"
    assert found["replay_perplexity_ratio"].reason == "no text is long enough for a replay"


def test_modes_are_settings_that_the_plugin_knows() -> None:
    assert MODES[0].name == FIRST
    assert len({mode.name for mode in MODES}) == len(MODES)
    for mode in MODES:
        given = arguments(mode, 5, 4096)
        Settings.read(given["additional_config"])
        assert given["max_model_len"] == 4096
        assert ("speculative_config" in given) == mode.drafts
    assert arguments(MODES[0], 5, 100_000)["max_model_len"] == 8192


def test_a_sitting_says_why_it_is_empty() -> None:
    assert Sitting({}, reason="no drafter").shown() == {"null": "no drafter"}
    shown = Sitting(SHARES, cached=7, drafts=10, accepted=25).shown()
    assert shown["tokens_per_block"] == 3.5 and shown["cached_prompt_tokens"] == 7
