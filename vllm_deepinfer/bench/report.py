"""The one form of every benchmark: a table for people, a JSON file for everything else."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator
from rich.console import Console
from rich.table import Table

from vllm_deepinfer.bench.figure import Figure
from vllm_deepinfer.bench.machine import Machine, current_commit

__all__ = ["Figure", "Machine", "Report", "current_commit"]


class Report(BaseModel):
    """What `vllm-deepinfer bench NAME --json FILE` writes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    commit: str = Field(default_factory=current_commit)
    machine: Machine = Field(default_factory=Machine.here)
    settings: dict[str, JsonValue] = Field(description="what was varied or fixed, enough to repeat the run")
    rounds: int = Field(ge=1, description="how often each side was measured, in turn")
    figures: tuple[Figure, ...]
    series: dict[str, JsonValue] = Field(default_factory=dict, description="what a chart draws")

    @model_validator(mode="after")
    def _names_are_unique(self) -> Self:
        names = [figure.name for figure in self.figures]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"report {self.name}: more than one figure is named {', '.join(twice)}")
        return self

    def table(self) -> Table:
        """One row per figure."""
        machine = f"{self.machine.cpu}, {self.machine.cores} cores"
        table = Table(
            title=f"bench {self.name}", caption=f"{machine}; {self.rounds} rounds; commit {self.commit}"
        )
        for heading in ("figure", "value", "unit", "lowest to highest", "target", "holds"):
            table.add_column(heading, justify="right" if heading == "value" else "left")
        for figure in self.figures:
            spread = " to ".join(f"{bound:.4g}" for bound in figure.spread) if figure.spread else ""
            value = "–" if figure.value is None else f"{figure.value:.4g}"
            holds = {None: "", True: "yes", False: "NO"}[figure.holds]
            table.add_row(figure.name, value, figure.unit, spread or figure.reason, figure.target, holds)
        return table

    def write(self, path: Path) -> None:
        """Write the JSON form atomically: a reader sees the old file or the whole new one."""
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with open(temporary, "x") as file:
                file.write(self.model_dump_json(indent=2) + "\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

    def finish(self, json: Path | None, console: Console | None = None) -> None:
        """Print the table and write the file, as every benchmark does at its end."""
        (console or Console()).print(self.table())
        if json is not None:
            self.write(json)
