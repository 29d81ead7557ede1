"""What each drafted row is divided by, and what comes of it in an engine."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens
from vllm_deepinfer_plugins import expansion


def test_installing_reaches_vllm_s_own_function_and_twice_is_once() -> None:
    """If vLLM's own does it right too, this module can go."""
    from vllm.platforms import current_platform
    from vllm.triton_utils import dispatcher
    from vllm.utils import cpu_triton_utils

    current_platform.register_triton_kernel_overrides()
    expansion.install()
    expansion.install()
    assert dispatcher._registry[expansion.KERNEL][1] is expansion.expand
    current_platform.register_triton_kernel_overrides()
    assert (
        dispatcher._registry[expansion.KERNEL][1] is cpu_triton_utils._expand_kernel_impl is expansion.expand
    )
    found = expand_batch_to_tokens(torch.tensor([0.7, 0.0, 1.3]), torch.tensor([2, 5, 5]), 5, 0, 1)
    assert torch.equal(found, torch.tensor([0.7, 0.7, 1.0, 1.0, 1.0]))


@given(
    requests=st.lists(st.tuples(st.integers(0, 6), st.sampled_from([0.0, 0.3, 1.0, 1.7])), max_size=12),
    dtype=st.sampled_from([torch.float32, torch.int32]),
)
def test_against_a_loop(requests: list[tuple[int, float]], dtype: torch.dtype) -> None:
    values = torch.tensor([value for _, value in requests]).to(dtype)
    ends = torch.tensor([count for count, _ in requests], dtype=torch.int32).cumsum(0).to(torch.int32)
    rows = sum(count for count, _ in requests)
    found = torch.full((rows,), 99, dtype=dtype)
    expansion.expand(found, values, ends, 0, 1)
    wanted = [value for (count, _), own in zip(requests, values, strict=True) for value in [own] * count]
    assert found.tolist() == [1 if value == 0 else value.item() for value in wanted]
