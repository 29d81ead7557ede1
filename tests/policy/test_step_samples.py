"""Samples: bounded, the latest of each shape, no shape pushed out by another."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vllm_deepinfer.policy.step_cost import Features
from vllm_deepinfer.policy.step_samples import PER_SHAPE, SHAPES, Samples, shape_of

steps = st.builds(
    Features,
    tokens=st.integers(0, 8192),
    decodes=st.integers(0, 256),
    decode_context=st.integers(0, 10**6),
    prefill_context=st.integers(0, 10**6),
)


@given(st.lists(steps, max_size=400))
def test_kept_samples_are_the_latest_of_their_shape(added: list[Features]) -> None:
    samples = Samples()
    for index, features in enumerate(added):
        sample = samples.add(features, 1.0 + index)
        assert (sample.number, sample.seconds, sample.features) == (index, 1.0 + index, features)
    kept = samples.all()
    assert samples.seen == len(added) and len(kept) <= PER_SHAPE * SHAPES
    for shape in {shape_of(sample.features) for sample in kept}:
        of_shape = [number for number, features in enumerate(added) if shape_of(features) == shape]
        here = sorted(sample.number for sample in kept if shape_of(sample.features) == shape)
        assert here == of_shape[len(of_shape) - len(here) :] and len(here) <= PER_SHAPE


def test_a_flood_of_one_shape_leaves_the_others_alone() -> None:
    samples = Samples()
    samples.add(Features(tokens=512, prefill_context=16_384), 0.1)
    for _ in range(10_000):
        samples.add(Features(decodes=4), 0.01)
    assert len(samples.all()) == PER_SHAPE + 1
    assert any(sample.features.prefill_context == 16_384 for sample in samples.all())


def test_the_shape_seen_longest_ago_goes_first() -> None:
    samples = Samples()
    for power in range(SHAPES + 1):
        samples.add(Features(decodes=2.0**power), 1.0)
        samples.add(Features(decodes=1.0), 1.0)  # in use all the time
    kept = {sample.features.decodes for sample in samples.all()}
    assert 1.0 in kept and 2.0 not in kept and 2.0**SHAPES in kept


def test_shapes_are_powers_of_two() -> None:
    assert shape_of(Features(tokens=64, decodes=3)) == shape_of(Features(tokens=127, decodes=2))
    assert shape_of(Features(tokens=64)) != shape_of(Features(tokens=128))
    assert shape_of(Features()) == (0, 0, 0, 0) == shape_of(Features(prefill_context=255))


def test_chunk_shapes_counts_sizes_of_prefill_only() -> None:
    samples = Samples()
    for tokens in (0, 32, 33, 64, 128):
        samples.add(Features(tokens=tokens, decodes=1), 1.0)
        samples.add(Features(tokens=tokens, decodes=8), 1.0)
    assert samples.chunk_shapes() == 3
