"""n-gram speculation beside replays, on and off; prints what came of it as JSON. See `test_engine`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import tests.conftest  # noqa: F401 (the environment of every engine in tests)
from tests.plugins.replay.oracle import Log, engine, scheduler_of
from tests.plugins.replay.test_engine import DOCUMENT, answer, serve


def settings(drafts: int) -> dict[str, Any]:
    """vLLM's for n-gram drafts."""
    speculation = {"method": "ngram", "num_speculative_tokens": drafts}
    return {"speculative_config": {**speculation, "prompt_lookup_max": 3, "prompt_lookup_min": 1}}


def main(folder: Path, drafts: int) -> None:
    prompt = (DOCUMENT[:20] * 6)[:113]
    found: dict[str, Any] = {}
    for name, given in (("off", {}), ("on", settings(drafts))):
        with engine(folder / name, **given) as llm:
            log = Log(scheduler_of(llm))
            found[name] = [answer(serve(llm, {"a": prompt}, tokens=24)["a"])]
            found[name] += [answer(serve(llm, {"b": [*prompt, 20]}, tokens=24)["b"])]
            if name == "on":
                found["hit"] = log.admissions["b"][0].hit
                found["steps with drafts"] = log.drafted
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
