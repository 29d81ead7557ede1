"""10,000 requests of clients that read, leave, dawdle or stop reading, on a failing, refusing engine."""

from __future__ import annotations

import pytest

from vllm_deepinfer.bench.gateway.soak import soak


@pytest.mark.slow
@pytest.mark.long
async def test_ten_thousand_requests_end_once_and_leave_nothing() -> None:
    found = await soak(10_000)
    assert found.lost == 0, found
    assert found.accepted == found.ended > 9_000
    assert not any(found.leaked.values()), found.leaked
    assert found.rss_growth < 0.05, found.rss_bytes
    for outcome in ("complete", "error", "left", "cut"):  # the soak did what it is for
        assert found.outcomes[outcome] > 0
