"""`vllm-deepinfer bench quality`: what the trained checkpoint can do, and what each mode of serving costs."""
