"""DeepSeek-V4.1 in portable PyTorch."""
