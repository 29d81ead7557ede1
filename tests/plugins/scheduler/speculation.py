"""Both schedulers beside n-gram speculation; prints what came of it as JSON. See `test_beside`."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import tests.conftest  # noqa: F401 (the environment of every engine in tests)
from tests.plugins.scheduler.harness import tiny, traffic
from tests.plugins.scheduler.test_beside import both

SPECULATION = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}


def main(folder: Path) -> None:
    arrivals = traffic(31, count=12)
    repetitive = [replace(a, prompt=(a.prompt[:20] * 20)[: len(a.prompt)]) for a in arrivals]
    with tiny(folder, speculative_config=SPECULATION) as llm:
        expected, found = both(llm, repetitive)
    limited = [r for r in found.records if r.decodes and r.chunks]
    result = {
        "stock": expected.answers,
        "ours": found.answers,
        "steps_with_drafts": sum(any(1 < n <= 4 for n in step.values()) for step in found.steps),
        "limited": len(limited),
        "over": sum(r.predicted > r.budget * (1 + 1e-9) for r in limited),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
