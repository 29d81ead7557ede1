"""Ranks of log-probabilities on a CPU without a compiler.

vLLM 0.32 counts the tokens above the sampled one with a function under `torch.compile`, which saves copies of
the logits on a GPU. Its first use takes 7 to 10 s on a CPU, in the middle of serving: the first request that
asks for `logprobs` stalls all others. What is compiled there is two plain operations, which take 1.6 ms for
four rows of 129,280 logits.
"""

from __future__ import annotations


def install() -> None:
    """Let vLLM's sampler call the function as it is written. Idempotent."""
    from vllm.v1.sample import sampler

    plain = getattr(sampler.batched_count_greater_than, "_torchdynamo_orig_callable", None)
    if plain is not None:
        sampler.batched_count_greater_than = plain
