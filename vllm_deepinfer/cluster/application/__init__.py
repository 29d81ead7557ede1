"""The Ray Serve application: pools that Ray places, gateways in front of them."""
