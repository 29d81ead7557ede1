"""`vllm-deepinfer bench gateway`: what the front door costs, beside the best alternative, in one run."""
