"""`vllm-deepinfer calibrate`: temperatures for a drafter's confidences, fitted on a real engine."""
