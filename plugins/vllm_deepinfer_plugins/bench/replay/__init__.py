"""`vllm-deepinfer bench replay`: prefill and warm prefixes, with bounded replay and without."""
