"""Benchmarks: `vllm-deepinfer bench NAME` and the one form in which every result is written."""
