"""DeepSeek-V4.1 checkpoints without torch: config, layout, number formats, and small ones to run."""
