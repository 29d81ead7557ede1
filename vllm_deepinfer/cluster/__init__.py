"""The cluster: pools of engine replicas behind gateways."""
