"""Index queries and scores against loops."""

from __future__ import annotations

import pytest
import torch
from vllm_deepinfer_plugins.model.indexer import Indexer, index_scores
from vllm_deepinfer_plugins.model.quant import quantize_cache
from vllm_deepinfer_plugins.model.rope import Rotary, rotate

from vllm_deepinfer.checkpoint.config import LayerPlan

from .samples import noise, text_config

DTYPES = [torch.float32, torch.bfloat16]


def plan(layer: int) -> LayerPlan:
    return text_config().schedule()[layer]


def scores_by_hand(queries: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Σ over heads of weight × relu(query · key), one number at a time."""
    scores = torch.zeros(len(queries), keys.shape[1], dtype=torch.float64)
    for token in range(len(queries)):
        for place in range(keys.shape[1]):
            products = (queries[token].double() @ keys[token, place].double()).clamp_min(0)
            scores[token, place] = sum(
                w * p for w, p in zip(weights[token].tolist(), products.tolist(), strict=True)
            )
    return scores


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_scores(dtype: torch.dtype, grad: bool) -> None:
    queries, weights = noise(5, 4, 32, dtype=dtype), noise(5, 4, seed=1, dtype=dtype)
    keys = noise(5, 9, 32, seed=2).bfloat16()  # as a paged cache keeps them
    with torch.set_grad_enabled(grad):
        gathered, shared = index_scores(queries, weights, keys), index_scores(queries, weights, keys[0])
    precise = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.15}
    torch.testing.assert_close(gathered.double(), scores_by_hand(queries, weights, keys), **precise)
    torch.testing.assert_close(
        shared.double(), scores_by_hand(queries, weights, keys[:1].expand(5, -1, -1)), **precise
    )


def test_scores_leave_their_inputs_alone() -> None:
    queries, weights, keys = noise(3, 4, 32), noise(3, 4, seed=1), noise(6, 32, seed=2)
    copies = [value.clone() for value in (queries, weights, keys)]
    with torch.no_grad():
        index_scores(queries, weights, keys)
        index_scores(queries, weights, keys.expand(3, -1, -1))
    assert all(torch.equal(a, b) for a, b in zip(copies, (queries, weights, keys), strict=True))


def test_negative_products_count_for_nothing() -> None:
    queries = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    keys = torch.tensor([[2.0, -3.0], [-2.0, 3.0], [-1.0, -1.0]])
    assert index_scores(queries, torch.tensor([[10.0, 100.0]]), keys).tolist() == [[20, 300, 0]]


def test_no_entries_no_scores() -> None:
    assert index_scores(noise(3, 4, 32), noise(3, 4), torch.empty(0, 32)).shape == (3, 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_queries(dtype: torch.dtype) -> None:
    config = text_config()
    torch.manual_seed(0)
    module = Indexer(config, plan(2), dtype)
    x, latent = noise(6, 64, dtype=dtype), noise(6, 32, seed=1, dtype=dtype)
    rotations = Rotary(config, compressed=True)(torch.arange(6) * 9)
    with torch.no_grad():
        queries, weights = module.queries(x, latent, rotations)
        raw = rotate((latent @ module.wq_b.weight.T).unflatten(1, (4, 32)), rotations)
        torch.testing.assert_close(weights, x @ module.weights_proj.weight.T * (32 * 4) ** -0.5)
    assert (queries.shape, queries.dtype, weights.dtype) == ((6, 4, 32), dtype, dtype)
    assert torch.equal(quantize_cache(queries, "mxfp4"), queries)
    assert float(torch.isclose(queries.float(), quantize_cache(raw, "mxfp4").float()).float().mean()) > 0.97


def test_only_a_kv_source_makes_index_keys() -> None:
    names = {
        layer: {name for name, _ in Indexer(text_config(), plan(layer), torch.float32).named_parameters()}
        for layer in (4, 6)
    }
    assert names[4] == {"wq_b.weight", "weights_proj.weight", "wk.weight", "k_norm.weight"}
    assert names[6] == {"wq_b.weight", "weights_proj.weight"}
