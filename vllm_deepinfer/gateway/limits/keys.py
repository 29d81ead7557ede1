"""API keys: random, shown once, kept as SHA-256.

A fast hash is right for them: a key has 256 random bits, so there is nothing to guess, and it is checked on
every request. (A password would need a slow one.)
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_deepinfer.gateway.errors import ApiError, from_validation

PREFIX = "sk-deepinfer-"


class ApiKey(BaseModel):
    """One key as the key file holds it.

    Attributes:
        name: shown in logs; also the tenant: stored responses and prefix-cache entries are per name.
        sha256: hex digest of the key.
        requests_per_minute, tokens_per_minute, max_concurrent: limits; None: none. Tokens are prompt and
            answer.
        min_priority: the lowest `priority` that this key may ask for; None: the server's bound.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    requests_per_minute: Annotated[int, Field(ge=1)] | None = None
    tokens_per_minute: Annotated[int, Field(ge=1)] | None = None
    max_concurrent: Annotated[int, Field(ge=1)] | None = None
    min_priority: int | None = None


class KeyFileError(ValueError):
    """The key file cannot be used; one sentence."""


def new_key(name: str) -> tuple[str, ApiKey]:
    """A fresh key and the entry for the key file. Raises: KeyFileError for a bad name."""
    key = PREFIX + secrets.token_urlsafe(32)
    try:
        return key, ApiKey(name=name, sha256=digest(key))
    except ValidationError as error:
        raise KeyFileError(str(from_validation(error))) from None


def digest(key: str) -> str:
    """What is kept of a key."""
    return hashlib.sha256(key.encode()).hexdigest()


class KeyRing:
    """The keys of a gateway; empty: everybody may ask."""

    def __init__(self, keys: Iterable[ApiKey] = ()) -> None:
        self._keys = {key.sha256: key for key in keys}
        if len({key.name for key in self._keys.values()}) != len(self._keys):
            raise KeyFileError("two API keys have the same name; names tell tenants apart.")

    @classmethod
    def load(cls, path: Path) -> KeyRing:
        """Read a YAML list of keys. Raises: KeyFileError."""
        try:
            entries = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            reason = str(error).splitlines()[0]
            raise KeyFileError(f"{path}: the key file cannot be read ({reason}).") from None
        if not isinstance(entries, list) or not entries:
            raise KeyFileError(f"{path}: the key file must be a list of keys, each with name and sha256.")
        try:
            return cls(ApiKey.model_validate(entry) for entry in entries)
        except ValidationError as error:
            raise KeyFileError(f"{path}: {from_validation(error)}") from None

    def __len__(self) -> int:
        return len(self._keys)

    def authenticate(self, authorization: str | None, x_api_key: str | None) -> ApiKey | None:
        """The key of a request, None when no keys are needed. Raises: ApiError 401.

        `Authorization: Bearer` as OpenAI's clients send it, `x-api-key` as Anthropic's.
        """
        if not self._keys:
            return None
        given = x_api_key
        if authorization is not None:
            scheme, _, token = authorization.partition(" ")
            given = token.strip() if scheme.lower() == "bearer" else given
        if not given:
            raise ApiError(
                401, "an API key is needed; send it as Authorization: Bearer KEY or x-api-key: KEY."
            )
        key = self._keys.get(digest(given))
        if key is None:
            raise ApiError(
                401, "this API key is not known here; check it, or ask for one.", code="invalid_api_key"
            )
        return key
