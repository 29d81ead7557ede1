"""Prefill here, decode there: vLLM's NIXL connector; holds can be released, and reads are checked."""
