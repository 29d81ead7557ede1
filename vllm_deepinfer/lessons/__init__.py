"""What the small trained checkpoint learns and is examined on: code, prose and generated lessons.

``documents`` in `stream` is the way in; nothing here needs torch or vLLM.
"""
