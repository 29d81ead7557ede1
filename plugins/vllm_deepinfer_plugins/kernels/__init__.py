"""Native kernels for a CPU: what a decode step in bfloat16 spends its time on, compiled once per machine."""

from .library import BLOCK, Kernels, active, load, suspended
from .structures import Filter, Paged

__all__ = ["BLOCK", "Filter", "Kernels", "Paged", "active", "load", "suspended"]
