"""vLLM-DeepInfer: the serving system around DeepSeek-V4.1-Flash. This distribution imports neither torch nor vLLM."""
