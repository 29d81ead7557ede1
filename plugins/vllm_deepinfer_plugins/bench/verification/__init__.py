"""`vllm-deepinfer bench verification`: verification off, of a fixed number of drafts, and adaptive."""
