"""HTTP: the OpenAI and Anthropic APIs in front of an Engine."""
