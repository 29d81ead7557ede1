"""Who may ask for how much: API keys, per-key limits, admission."""
