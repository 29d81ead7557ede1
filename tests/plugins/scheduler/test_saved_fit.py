"""The file of a fit: written whole, read back, ignored with one warning when it is foreign."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_deepinfer_plugins.scheduler import saved_fit
from vllm_deepinfer_plugins.scheduler.fit_keeper import SAVE_EVERY, FitKeeper

from vllm_deepinfer.policy.step_cost import TWO_CORE_DENSE, StepCost
from vllm_deepinfer.policy.step_cost_learner import StepCostLearner

HERE = {"model": "tiny", "vllm": "0.32.0"}


def config(model: str = "tiny", dtype: str = "bfloat16", **ours: Any) -> Any:
    return SimpleNamespace(
        additional_config={"deepinfer": ours},
        model_config=SimpleNamespace(
            model=model,
            dtype=dtype,
            quantization=None,
            enforce_eager=True,
            hf_config=SimpleNamespace(to_json_string=lambda: '{"hidden_size": 64}'),
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
    )


def test_written_and_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "deep" / "fit.json"
    assert saved_fit.read(path, HERE) is None
    assert saved_fit.write(path, TWO_CORE_DENSE, HERE)
    assert saved_fit.read(path, HERE) == TWO_CORE_DENSE
    assert [p.name for p in path.parent.iterdir()] == ["fit.json"]
    assert not caplog.records


def test_a_foreign_fit_is_ignored_with_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved_fit.write(tmp_path / "fit", TWO_CORE_DENSE, {**HERE, "model": "other"})
    with caplog.at_level(logging.WARNING):
        assert saved_fit.read(tmp_path / "fit", HERE) is None
    [record] = caplog.records
    assert "it was fitted with model 'other', and this is 'tiny'; a new one is fitted" in record.getMessage()


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe", b"null"])
def test_a_damaged_fit_is_ignored_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    (tmp_path / "fit").write_bytes(content)
    assert saved_fit.read(tmp_path / "fit", HERE) is None
    assert len(caplog.records) == 1


def test_a_folder_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    assert not saved_fit.write(tmp_path / "file" / "fit.json", TWO_CORE_DENSE, HERE)
    assert "could not be saved" in caplog.text


def test_the_fingerprint_tells_models_and_dtypes_apart() -> None:
    fingerprints = [saved_fit.fingerprint_of(config(*c)) for c in (("a", "x"), ("b", "x"), ("a", "y"))]
    assert len({tuple(f.items()) for f in fingerprints}) == 3
    assert fingerprints[0]["vllm"].startswith("0.32.0") and fingerprints[0]["parallel"] == "1x1"
    assert len({saved_fit.default_path(f) for f in fingerprints}) == 3


def test_a_fit_over_trimmed_prompts_is_another() -> None:
    cut, whole = (saved_fit.fingerprint_of(config(decoder_replay=cut)) for cut in (True, False))
    assert cut != whole and whole == saved_fit.fingerprint_of(config())


def learner(fitted: bool = True) -> StepCostLearner:
    made = StepCostLearner(StepCost(0, 0, tile=32), TWO_CORE_DENSE if fitted else None)
    made.refits = 1
    return made


def test_the_keeper_saves_at_most_once_a_minute(tmp_path: Path) -> None:
    path, here = tmp_path / "fit.json", learner()
    keeper = FitKeeper(str(path), config())
    keeper.offer(here, 0.0)
    assert path.exists()
    path.unlink()
    here.refits += 1
    keeper.offer(here, SAVE_EVERY - 1)
    assert not path.exists()
    keeper.offer(here, SAVE_EVERY)
    assert path.exists()
    path.unlink()
    keeper.offer(here, 10 * SAVE_EVERY)  # nothing new
    assert not path.exists()


def test_an_unusable_fit_is_not_saved(tmp_path: Path) -> None:
    FitKeeper(str(tmp_path / "fit.json"), config()).offer(learner(fitted=False), 0.0)
    assert not list(tmp_path.iterdir())


def test_a_fit_for_another_tile_is_not_taken(tmp_path: Path) -> None:
    keeper = FitKeeper(str(tmp_path / "fit.json"), config())
    keeper.offer(learner(), 0.0)
    assert keeper.read(StepCost(0, 0, tile=32)) == TWO_CORE_DENSE
    assert keeper.read(StepCost(0, 0, tile=64)) is None
    assert FitKeeper(str(tmp_path / "fit.json"), config("other")).read(StepCost(0, 0, tile=32)) is None
