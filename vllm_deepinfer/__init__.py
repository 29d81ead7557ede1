"""vLLM-DeepInfer: the serving system around DeepSeek-V4.1-Flash. Imports neither torch nor vLLM."""
