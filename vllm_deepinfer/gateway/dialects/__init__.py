"""The three APIs. Each file: which fields there are, conversion to a prompt, and the answer's wire format."""
