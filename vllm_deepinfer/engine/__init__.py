"""The Engine protocol: token ids in, token deltas out. Gateway, cluster and benchmarks know nothing else of an engine."""
