"""The shared prefix store: keys, codec, backends, retention at work. See README.md."""
