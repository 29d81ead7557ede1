"""Training of a small DeepSeek-V4.1 on a CPU: the backbone, then its DSpark drafter; plain PyTorch."""
