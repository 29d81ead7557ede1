"""How many drafts of each request the target verifies: the policy inside vLLM's scheduler."""
