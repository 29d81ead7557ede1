"""The DSpark drafter, and what runs it in vLLM's model runner V1.

vllm serve MODEL --speculative-config '{"method": "custom_class", "num_speculative_tokens": 5,
    "model": "vllm_deepinfer_plugins.draft.proposer.DSparkProposer"}'
"""
