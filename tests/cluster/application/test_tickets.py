from __future__ import annotations

from vllm_deepinfer.cluster.application.tickets import PREFIX_TOKENS, Ticket, prefix_of


def test_what_is_fetched_needs_no_prefill_and_still_occupies_kv() -> None:
    ticket = Ticket("a", prompt_tokens=100, output_tokens=20, computed_tokens=100)
    assert ticket.prefill_tokens == 0
    assert ticket.kv_tokens == 120
    assert Ticket("a", prompt_tokens=100, output_tokens=20).prefill_tokens == 100


def test_prompts_that_begin_alike_have_the_same_prefix_whatever_follows() -> None:
    beginning = list(range(PREFIX_TOKENS))
    assert prefix_of([*beginning, 1, 2, 3]) == prefix_of([*beginning, 9]) == prefix_of(tuple(beginning))
    assert prefix_of([*beginning[:-1], 999]) != prefix_of(beginning)
    assert prefix_of([7]) == prefix_of([7]) != prefix_of([8])


def test_ids_beyond_32_bits_are_no_trouble() -> None:
    assert prefix_of([1 << 40]) != prefix_of([0])
