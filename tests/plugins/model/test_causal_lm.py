"""The model class inside vLLM: golden parity through a real engine; other schedules as the plain form."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm_deepinfer_plugins.kernels import active, load
from vllm_deepinfer_plugins.model import causal_lm
from vllm_deepinfer_plugins.model.causal_lm import DeepseekV41ForCausalLM
from vllm_deepinfer_plugins.model.sequence import Store
from vllm_deepinfer_plugins.model.tiles import ROWS
from vllm_deepinfer_plugins.model.weights import load_backbone, read_tensors

from . import engines
from .engines import FIXTURES, NAMES
from .samples import assert_parity, backbone, config_fields, divergence, golden, tiny, token_ids

VOCAB = 512
# Schedules and sizes that the fixtures do not have.
SCHEDULES: dict[str, dict[str, Any]] = {
    "window-alone": {"ratios": (0, 0, 0), "engram_layers": ()},
    "one-source-from-the-start": {"ratios": (1, 1, 1), "engram_layers": ()},
    "ratios-4-2-1-two-engrams": {"ratios": (0, 4, 4, 2, 2, 1, 1), "engram_layers": (0, 4)},
    "tiny-candidate-blocks": {
        "ratios": (2, 2, 1, 1, 1),
        "index_sources": (0, 1, 2, 3, 4),
        "overrides": {"candidate_topk_blocks": 2, "candidate_block_size": 2, "index_topk": 3},
    },
    "one-entry-one-token": {"ratios": (0, 2, 1, 1), "window": 1, "overrides": {"index_topk": 1}},
    "released-encoding": {"ratios": (0, 2, 1), "encoding": "released", "dspark_blocks": 1},
}


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.no_grad():
        yield


def engine_logits(llm: Any, prompts: list[list[int]]) -> list[torch.Tensor]:
    """Log-probabilities [length, vocab] of prompts in one call: those of each token, and of the one after."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=VOCAB, logprobs=VOCAB)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
    results = []
    for output in outputs:
        rows = [*output.prompt_logprobs[1:], output.outputs[0].logprobs[0]]
        values = torch.full((len(rows), VOCAB), -torch.inf)
        for at, row in enumerate(rows):
            values[at, list(row)] = torch.tensor([entry.logprob for entry in row.values()])
        results.append(values)
    return results


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_golden_parity_through_the_engine(name: str) -> None:
    """The fixture's own folder, in which golden.safetensors lies beside the weights."""
    wanted = golden(name)
    with engines.engine(FIXTURES / name, max_logprobs=VOCAB, enable_prefix_caching=False) as llm:
        found = engine_logits(llm, [ids.tolist() for ids, _ in wanted.values()])
    for (_, logits), ours in zip(wanted.values(), found, strict=True):
        assert_parity(logits, ours)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_other_schedules_as_the_plain_form(schedule: str, tmp_path: Path) -> None:
    path = tiny(tmp_path, vocab=VOCAB, **SCHEDULES[schedule])
    plain, prompts = load_backbone(path), engines.prompts([1, 2, 3, 17, 64, 100])
    with engines.engine(path, max_logprobs=VOCAB, max_model_len=512, enable_prefix_caching=False) as llm:
        found = engine_logits(llm, prompts)
    for ids, ours in zip(prompts, found, strict=True):
        wanted = plain.whole(torch.tensor([ids]))[0]
        assert float(wanted.std()) > 1
        assert float(divergence(wanted, ours).max()) <= 1e-4


# Without an engine


def vllm_config(folder: Path | str = FIXTURES / NAMES[0], name: str = NAMES[0], **text: Any) -> Any:
    fields = config_fields(name)
    fields["text_config"] |= text
    return SimpleNamespace(
        model_config=SimpleNamespace(
            hf_config=SimpleNamespace(to_dict=lambda: fields),
            dtype=torch.float32,
            model=str(folder),
            tokenizer=str(folder),
            tokenizer_revision=None,
        ),
        cache_config=SimpleNamespace(block_size=16),
        compilation_config=SimpleNamespace(static_forward_context={}),
        additional_config={},
        speculative_config=None,
    )


@pytest.fixture
def model() -> DeepseekV41ForCausalLM:
    module = DeepseekV41ForCausalLM(vllm_config=vllm_config(), prefix="model")
    module.load_weights(read_tensors(FIXTURES / NAMES[0]))
    return module


def test_loaded_parameters_are_all_reported() -> None:
    module = DeepseekV41ForCausalLM(vllm_config=vllm_config())
    filled = module.load_weights(read_tensors(FIXTURES / NAMES[0]))
    assert filled == {name for name, _ in module.named_parameters()}
    reference = dict(backbone().named_parameters())
    assert all(torch.equal(p, reference[name]) for name, p in module.backbone.named_parameters())


@pytest.mark.parametrize("name", NAMES)
def test_stores(name: str) -> None:
    """What a token leaves behind, layer by layer; the names start with vLLM's prefix."""
    config = vllm_config(name=name)
    module = DeepseekV41ForCausalLM(vllm_config=config, prefix="model")
    size, index = module.config.head_dim, module.config.index_head_dim
    for (kind, layer), store in module.stores.tokens.items():
        plan = module.config.schedule()[layer]
        channels, window = {
            Store.WINDOW: (size, module.config.sliding_window),
            Store.POOL: (2 * size, plan.ratio),
            Store.IDS: (1, module.config.engram_max_ngram_size),
        }[kind]
        assert (store.channels, store.window, store.ratio, store.block_size) == (channels, window, 1, 16)
        assert kind is not Store.POOL or (plan.owns_kv and plan.ratio > 1)
    assert {at for kind, at in module.stores.tokens if kind is Store.WINDOW} == set(
        range(len(module.backbone.layers))
    )
    for layer, store in module.stores.entries.items():
        plan = module.config.schedule()[layer]
        assert plan.owns_kv and (store.channels, store.window, store.ratio) == (
            size + index,
            None,
            plan.ratio,
        )
    registered = config.compilation_config.static_forward_context
    assert set(registered) == {store.prefix for store in module._paged}
    assert all(prefix.startswith("model.layers.") for prefix in registered)


@pytest.mark.parametrize(("window", "kept"), [(1, 2), (2, 2), (3, 3)])
def test_a_window_of_one_token_keeps_two_for_the_prefix_cache(window: int, kept: int) -> None:
    module = DeepseekV41ForCausalLM(vllm_config=vllm_config(sliding_window=window))
    windows = {store.window for (kind, _), store in module.stores.tokens.items() if kind is Store.WINDOW}
    assert windows == {kept}


def test_no_store_for_what_a_model_does_not_have() -> None:
    text: dict[str, Any] = {"engram_layer_ids": [], "engram_num_embeddings": []}
    module = DeepseekV41ForCausalLM(vllm_config=vllm_config(**text))
    assert (Store.IDS, 0) not in module.stores.tokens
    assert set(module.stores.entries) == {2, 4}


def test_without_caches_the_plain_form(
    model: DeepseekV41ForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's memory profiling runs the model before there are caches."""
    monkeypatch.setattr(causal_lm, "get_forward_context", lambda: SimpleNamespace(attn_metadata=None))
    ids = token_ids(300)
    hidden = model(ids, torch.arange(300))
    assert hidden.shape == (300, 64)
    assert not hidden[causal_lm.PROFILE_TOKENS :].any()
    assert_parity(backbone().whole(ids[:20].unsqueeze(0))[0], model.compute_logits(model(ids[:20], None)))


@pytest.mark.parametrize("settings", [{"batch_invariant": True}, {"native_kernels": False}])
def test_kernels_of_another_engine_in_the_process_are_not_taken(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, bool]
) -> None:
    monkeypatch.setattr(causal_lm, "get_forward_context", lambda: SimpleNamespace(attn_metadata=None))
    config = vllm_config()
    config.model_config.dtype, config.additional_config = torch.bfloat16, {"deepinfer": settings}
    module = DeepseekV41ForCausalLM(vllm_config=config)
    module.load_weights(read_tensors(FIXTURES / NAMES[0]))
    module._ready = True  # unpacked: without vLLM's operators
    loaded, used = load(), []
    monkeypatch.setattr(loaded, "enter", lambda *_: used.append("enter"))
    monkeypatch.setattr(loaded, "rows", lambda *_, **__: used.append("rows"))
    ids = token_ids(9)
    with torch.no_grad():
        hidden = module(ids, torch.arange(9))
    assert used == []
    with torch.no_grad():
        assert active(hidden) is loaded, "the other engine keeps them"
    assert hidden.isfinite().all()


def test_logits_of_no_rows(model: DeepseekV41ForCausalLM) -> None:
    logits = model.compute_logits(torch.empty(0, 64))
    assert (logits.shape, logits.dtype) == ((0, VOCAB), torch.float32)


def test_embeddings(model: DeepseekV41ForCausalLM) -> None:
    ids = torch.tensor([5, 5, 400])
    assert torch.equal(model.embed_input_ids(ids), backbone().embed.weight[ids])


def test_text_only(model: DeepseekV41ForCausalLM) -> None:
    with pytest.raises(ValueError, match="text only: send token ids"):
        model(token_ids(3), torch.arange(3), inputs_embeds=torch.zeros(3, 64))


@pytest.mark.parametrize(("setting", "rows"), [(True, ROWS), (False, None)])
def test_batch_invariant_mode_is_a_setting(setting: bool, rows: int | None) -> None:
    config = vllm_config()
    config.additional_config = {"deepinfer": {"batch_invariant": setting}}
    assert DeepseekV41ForCausalLM(vllm_config=config).tiles.rows == rows


def test_which_files_hold_weights(tmp_path: Path) -> None:
    assert DeepseekV41ForCausalLM(vllm_config=vllm_config()).allow_patterns_overrides == ["model.safetensors"]
    sharded = tiny(tmp_path, vocab=VOCAB, layers=3)  # vLLM goes by an index where there is one
    shutil.copy(FIXTURES / NAMES[0] / "tokenizer.json", sharded)
    assert DeepseekV41ForCausalLM(vllm_config=vllm_config(sharded)).allow_patterns_overrides is None
