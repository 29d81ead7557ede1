"""Tests of the checkpoint package: configs, layout, encodings, tokenizer and the small checkpoint."""
