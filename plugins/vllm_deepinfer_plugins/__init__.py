"""What stock vLLM loads: one module per extension point. Importing this package imports neither torch nor vLLM."""
