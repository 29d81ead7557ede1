"""The engines that a gateway can be started on, found by name.

The simulated one is part of the library. Others register a factory (checkpoint folder, flags) → Engine under
the entry point group `vllm_deepinfer.engine`; so the library loads vLLM without knowing it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from vllm_deepinfer.engine import Engine
from vllm_deepinfer.engine.simulated import SimulatedConfig, SimulatedEngine, hashed_tokens
from vllm_deepinfer.errors import UserError

GROUP = "vllm_deepinfer.engine"
Factory = Callable[..., Engine]


def make_engine(name: str, model: Path, arguments: list[str], **settings: Any) -> Engine:
    """An engine that is not started yet. Raises: UserError.

    Args:
        settings: for a factory that takes more than flags.
    """
    if name == "simulated":
        return simulated(model, arguments)
    found = {point.name: point for point in entry_points(group=GROUP)}
    if name not in found:
        names = ", ".join(sorted({"simulated", *found}))
        raise UserError(f"--engine {name}: choose one of {names}; vllm comes with vllm-deepinfer-plugins.")
    factory: Factory = found[name].load()
    return factory(model, arguments, **settings)


def simulated(model: Path, arguments: list[str]) -> SimulatedEngine:
    """A simulated engine with the vocabulary of a checkpoint and numbers of SimulatedConfig as arguments.

    Raises: UserError, also for an argument that SimulatedConfig does not have.
    """
    numbers = {
        field.name for field in fields(SimulatedConfig) if field.type in ("int", "float", "int | None")
    }
    values: dict[str, Any] = vocabulary(model)
    rest = list(arguments)
    while rest:
        flag = rest.pop(0)
        name, _, value = flag.partition("=")
        field = name.removeprefix("--").replace("-", "_")
        if not name.startswith("--") or field not in numbers:
            raise UserError(f"the simulated engine has no {name}; it has {_flags(numbers)}.")
        text = value or (rest.pop(0) if rest else "")
        try:
            values[field] = float(text) if "." in text else int(text)
        except ValueError:
            raise UserError(f"{name} needs a number, got {text!r}.") from None
    try:
        config = SimulatedConfig(**values)
    except ValueError as error:
        raise UserError(f"the simulated engine refuses that: {error}") from None
    return SimulatedEngine(config, tokens=hashed_tokens(config.vocab_size))


def _flags(names: set[str]) -> str:
    return ", ".join(f"--{name.replace('_', '-')}" for name in sorted(names))


def vocabulary(model: Path) -> dict[str, Any]:
    """What a simulated engine pretends: the model's name, vocab_size and eos_token_id. Raises: UserError."""
    file = model / "tokenizer.json"
    try:
        parsed = json.loads(file.read_text(encoding="utf-8"))
        control = {token["content"]: token["id"] for token in parsed["added_tokens"]}
        size = max(*parsed["model"]["vocab"].values(), *control.values()) + 1
        eos = control["<｜end▁of▁sentence｜>"]
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{file} is not a readable tokenizer.json of this model family.") from None
    return {"model": model.resolve().name, "vocab_size": size, "eos_token_id": eos}
