"""`vllm-deepinfer bench scheduler`: traffic, noise-free bound, figures, charts; the plugins run vLLM."""
