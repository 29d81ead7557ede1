"""One figure of a benchmark: a value with its unit, its target, and how far the rounds lay apart."""

from __future__ import annotations

import operator
import re
import statistics
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, computed_field, field_validator, model_validator

_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
    "=": operator.eq,
}
_TARGET = re.compile(r"(>=|<=|>|<|=) (-?\d+(?:\.\d+)?(?:e-?\d+)?)")

Finite = Annotated[float, Field(allow_inf_nan=False)]


class Figure(BaseModel):
    """A figure under the name that an issue or the README gives it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
    value: Finite | None = Field(description="median over the rounds; null where it could not be measured")
    unit: str = Field(description="unit of value and spread; 'ratio' for a quotient of two of the same unit")
    target: str | None = Field(
        default=None, description="a comparison and a number in this unit, such as '>= 1.0'"
    )
    spread: tuple[Finite, Finite] | None = Field(default=None, description="lowest and highest round")
    reason: str | None = Field(default=None, description="why value is null")

    @model_validator(mode="before")
    @classmethod
    def _holds_is_computed(cls, data: Any) -> Any:
        """A written report can be read back: its `holds` is computed again."""
        return {key: data[key] for key in data if key != "holds"} if isinstance(data, dict) else data

    @field_validator("target")
    @classmethod
    def _target_is_a_comparison(cls, target: str | None) -> str | None:
        if target is not None and not _TARGET.fullmatch(target):
            raise ValueError(f"target {target!r} is not a comparison and a number, such as '>= 1.0'")
        return target

    @model_validator(mode="after")
    def _value_or_reason(self) -> Self:
        if (self.value is None) == (self.reason is None):
            raise ValueError(f"figure {self.name}: give a value, or a null value and the reason for it")
        if self.value is None and self.spread is not None:
            raise ValueError(f"figure {self.name}: a null value has no spread")
        if self.value is not None and self.spread is not None:
            lowest, highest = self.spread
            if not lowest <= self.value <= highest:
                raise ValueError(
                    f"figure {self.name}: value {self.value} lies outside its spread {self.spread}"
                )
        return self

    @computed_field(  # type: ignore[prop-decorator]  # mypy issue 1362
        description="whether the value meets the target; null without a value or a target"
    )
    @property
    def holds(self) -> bool | None:
        """Whether the value meets the target; None without a value or a target."""
        parts = _TARGET.fullmatch(self.target or "")
        if self.value is None or parts is None:
            return None
        return _COMPARISONS[parts[1]](self.value, float(parts[2]))

    @classmethod
    def measured(cls, name: str, rounds: Sequence[float], unit: str, target: str | None = None) -> Self:
        """Median, lowest and highest of at least one round."""
        spread = (min(rounds), max(rounds)) if len(rounds) > 1 else None
        return cls(name=name, value=statistics.median(rounds), unit=unit, target=target, spread=spread)

    @classmethod
    def missing(cls, name: str, unit: str, reason: str, target: str | None = None) -> Self:
        """A figure that could not be measured: it stays in the report, with the reason."""
        return cls(name=name, value=None, unit=unit, target=target, reason=reason)
