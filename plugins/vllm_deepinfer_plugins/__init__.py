"""What stock vLLM loads: one module per extension point. Importing it imports neither torch nor vLLM."""
