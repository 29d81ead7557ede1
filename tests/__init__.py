"""They mirror both packages, one file per source file; `tests/plugins/` mirrors `vllm_deepinfer_plugins`."""
