"""The shared prefix store as a vLLM KV connector. See README.md.

--kv-transfer-config '{"kv_connector": "PrefixStoreConnector",
                       "kv_connector_module_path": "vllm_deepinfer_plugins.kv_connector",
                       "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
                       "kv_connector_extra_config": {"store": "/var/lib/kv"}}'
"""

from .connector import PrefixStoreConnector

__all__ = ["PrefixStoreConnector"]
