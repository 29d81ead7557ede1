"""Pure decisions: dataclasses in, dataclasses out; no I/O, clock, randomness or other package of ours."""
