"""Set-up of the checkout: one `.venv` with both distributions and vLLM's CPU stack, cured.

`sh tools/set_up.sh` runs it; it needs the standard library only. It writes nothing outside the checkout: the
environment goes to `.venv`, pip's cache, temporary files and log to `.cache`.
"""
