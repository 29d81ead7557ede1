"""Pure decisions: dataclasses in, dataclasses out; no I/O, no clock, no randomness, nothing of ours imported."""
