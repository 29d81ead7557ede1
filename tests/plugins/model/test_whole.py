"""The plain form: parity with another implementation, causality, batches, and attention by its definition."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from safetensors import safe_open
from vllm_deepinfer_plugins.model.attention import sink_attention
from vllm_deepinfer_plugins.model.indexer import index_scores
from vllm_deepinfer_plugins.model.sequence import Store
from vllm_deepinfer_plugins.model.whole import WholeSequences

from vllm_deepinfer.checkpoint.config import TextConfig

from .engines import FIXTURES, NAMES
from .samples import assert_parity, backbone, divergence, golden, noise, text_config, token_ids, variant

GOLDEN = [
    (name, int(key.removeprefix("ids.")))
    for name in NAMES
    for key in safe_open(FIXTURES / name / "golden.safetensors", "pt").keys()  # noqa: SIM118 (no mapping)
    if key.startswith("ids.")
]


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.no_grad():
        yield


def test_the_fixtures_are_all_there() -> None:
    assert [length for _, length in sorted(GOLDEN)] == [5, 37, 160, 301, 37, 160, 5, 37, 160, 301]


@pytest.mark.parametrize(("name", "length"), sorted(GOLDEN))
def test_golden_parity(name: str, length: int) -> None:
    ids, logits = golden(name)[length]
    assert_parity(logits, backbone(name).whole(ids.unsqueeze(0))[0])


def test_parity_can_fail() -> None:
    """The candidate filter matters: without it the logits of the longer prompts are others."""
    ids, logits = golden(NAMES[0])[301]
    without = variant(candidate_source_layer_id=-1).whole(ids.unsqueeze(0))[0]
    assert_parity(logits[:30], without[:30])
    with pytest.raises(AssertionError):
        assert_parity(logits, without)


@pytest.mark.parametrize("changed", [0, 1, 30, 62, 69])
def test_no_token_changes_logits_before_it(changed: int) -> None:
    model, ids = backbone(), token_ids(70)
    before = model.whole(ids.unsqueeze(0))[0]
    ids[changed] = (ids[changed] + 100 - 11) % 500 + 11
    after = model.whole(ids.unsqueeze(0))[0]
    # Not bit for bit: a row's experts compute in another batch.
    assert (divergence(before[:changed], after[:changed]) < 1e-3).all()
    assert float(divergence(before[changed], after[changed])) > 0.1


@pytest.mark.parametrize("length", [1, 2, 33])
def test_what_follows_does_not_matter(length: int) -> None:
    """A prefix alone has the logits of that prefix in a longer sequence, where all entries are selected."""
    model, ids = variant(index_topk=64, candidate_topk_blocks=16), token_ids(64)
    assert_parity(model.whole(ids.unsqueeze(0))[0, :length], model.whole(ids[:length].unsqueeze(0))[0])


def test_the_first_token_matters_at_the_end() -> None:
    model, ids = backbone(), token_ids(64)
    before = model.whole(ids.unsqueeze(0))[0, -1]
    ids[0] = (ids[0] + 100 - 11) % 500 + 11
    assert float((model.whole(ids.unsqueeze(0))[0, -1] - before).abs().max()) > 1e-3


@pytest.mark.parametrize("name", NAMES[:2])
def test_a_batch_of_two_is_each_alone(name: str) -> None:
    model, ids = backbone(name), torch.stack((token_ids(75, seed=1), token_ids(75, seed=2)))
    together = model.whole(ids)
    for row in range(2):
        alone = model.whole(ids[row : row + 1])[0]
        assert_parity(alone, together[row])


def sequences(config: TextConfig, batch: int, length: int) -> WholeSequences:
    return WholeSequences(config, batch, length, torch.device("cpu"))


def test_history_of_each_sequence_by_itself() -> None:
    sequence, rows = sequences(text_config(), 2, 4), torch.arange(8.0).unsqueeze(-1)
    sequence.put(Store.POOL, 2, rows)
    found, known = sequence.history(Store.POOL, 2, 3)
    assert known.tolist() == [[False, False, True], [False, True, True], [True] * 3, [True] * 3] * 2
    assert found[known].flatten().tolist() == [0, 0, 1, 0, 1, 2, 1, 2, 3, 4, 4, 5, 4, 5, 6, 5, 6, 7]


def test_positions_rotations_and_what_is_visible() -> None:
    sequence = sequences(text_config(), 2, 5)
    assert sequence.positions.tolist() == [0, 1, 2, 3, 4] * 2
    assert sequence.visible(1).tolist() == [1, 2, 3, 4, 5] * 2
    assert sequence.visible(2).tolist() == [0, 1, 1, 2, 2] * 2
    assert sequence.visible(4).tolist() == [0, 0, 0, 1, 1] * 2
    own, first = sequence.rotations(2), sequence.rotations(2, first_of_group=True)
    assert torch.equal(first[1:5], own[:4])
    assert torch.equal(first[0], own[0]), "there is no position before 0"
    assert not torch.equal(sequence.rotations(0), own)
    assert torch.equal(sequence.rotations(1), own)


def attended_by_hand(
    config: TextConfig,
    queries: torch.Tensor,
    window: torch.Tensor,
    entries: torch.Tensor,
    chosen: list[list[int]],
) -> torch.Tensor:
    """Each token's own list of keys: the window's tokens, then the chosen entries."""
    rows = []
    for token in range(len(queries)):
        keys = [window[at] for at in range(max(token - config.sliding_window + 1, 0), token + 1)]
        keys += [entries[entry, : config.head_dim] for entry in chosen[token]]
        stacked = torch.stack(keys).unsqueeze(0)
        seen = torch.ones(1, len(keys)).bool()
        rows.append(sink_attention(queries[token : token + 1], stacked, seen, torch.full((4,), 0.3)))
    return torch.cat(rows)


@pytest.mark.parametrize("layer", [2, 4])
def test_selection_and_attention_token_by_token(layer: int) -> None:
    """Ratio 2 and ratio 1 with candidate blocks: scores, selection and attention from their definitions."""
    config = text_config(index_topk=5, candidate_topk_blocks=3, sliding_window=7)
    plan, length = config.schedule()[layer], 45
    sequence = sequences(config, 1, length)
    queries, window = noise(length, 4, 32), noise(length, 32, seed=1)
    raw, entries = noise(length, 64, seed=2), []
    raw[:, 32:] = raw[:, 32:].abs()  # positive products: no two scores are equal, so that ties do not matter
    index_queries, weights = noise(length, 4, 32, seed=3).abs(), noise(length, 4, seed=4)
    sequence.put(Store.WINDOW, layer, window)
    sequence.put_entries(plan, raw)
    sequence.select(plan, index_queries, weights)
    entries = raw[plan.ratio - 1 :: plan.ratio]
    scores = index_scores(index_queries, weights, entries[:, 32:])
    chosen = []
    for token in range(length):
        visible = list(range((token + 1) // plan.ratio))
        best = sorted(visible, key=lambda entry: -float(scores[token, entry]))[:5]
        chosen.append(sorted(best))
    found = sequence.attend(plan, queries, torch.full((4,), 0.3))
    torch.testing.assert_close(found, attended_by_hand(config, queries, window, entries, chosen))
    if plan.is_candidate_source:  # the next indexer scores inside this one's blocks
        later = config.schedule()[6]
        sequence.put(Store.WINDOW, 6, window)
        sequence.select(later, index_queries.flip(0), weights)
        other = index_scores(index_queries.flip(0), weights, entries[:, 32:])
        for token in range(length):
            blocks = range(token // 4 + 1)
            value = [float(scores[token, 4 * b : min(4 * b + 4, token + 1)].max()) for b in blocks]
            value[-1] = float("inf")
            kept = sorted(blocks, key=lambda block: -value[block])[:3]
            inside = [entry for entry in range(token + 1) if entry // 4 in kept]
            chosen[token] = sorted(sorted(inside, key=lambda entry: -float(other[token, entry]))[:5])
        found = sequence.attend(later, queries, torch.full((4,), 0.3))
        torch.testing.assert_close(found, attended_by_hand(config, queries, window, entries, chosen))


def test_a_layer_of_the_window_alone_sees_no_entries() -> None:
    config = text_config(sliding_window=3)
    sequence, queries, window = sequences(config, 1, 9), noise(9, 4, 32), noise(9, 32, seed=1)
    sequence.put(Store.WINDOW, 0, window)
    found = sequence.attend(config.schedule()[0], queries, torch.full((4,), 0.3))
    torch.testing.assert_close(found, attended_by_hand(config, queries, window, noise(0, 64), [[]] * 9))
