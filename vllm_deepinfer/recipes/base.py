"""What all parts of a recipe have in common."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(gt=0, le=1)]
Port = Annotated[int, Field(ge=1, le=65535)]
Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]{0,30}$")]
"""Of a pool or recipe: a metric label, part of a Ray actor's name, and a file name."""


class Part(BaseModel):
    """Frozen; an unknown key is an error; no number is made from a string or a truth value.

    `recipes.load` reads YAML as if it were JSON, because pydantic's strict mode then takes a list for a tuple
    and a string for a path.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
