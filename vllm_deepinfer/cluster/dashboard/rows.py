"""The dashboard, from top to bottom."""

from __future__ import annotations

from .engines import ENGINES
from .failures import FAILURES
from .pools import POOLS
from .service import SERVICE

ROWS = (SERVICE, POOLS, FAILURES, ENGINES)
