"""Benchmarks that need vLLM and torch."""
