"""`vllm-deepinfer bench scheduler`: the part that runs vLLM."""
