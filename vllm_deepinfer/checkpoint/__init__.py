"""Writes small DeepSeek-V4.1 checkpoints for machines that cannot hold the released one."""
