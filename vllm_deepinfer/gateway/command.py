"""`vllm-deepinfer gateway` and `vllm-deepinfer gateway-key`."""

from __future__ import annotations

import asyncio
import ipaddress
import itertools
import json
import os
import shlex
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from pydantic import ValidationError

from vllm_deepinfer.engine import EngineDead
from vllm_deepinfer.errors import UserError
from vllm_deepinfer.gateway import logs
from vllm_deepinfer.gateway.errors import from_validation
from vllm_deepinfer.gateway.limits.keys import KeyFileError, KeyRing, new_key
from vllm_deepinfer.gateway.serve import listen, serve
from vllm_deepinfer.gateway.settings import GatewaySettings
from vllm_deepinfer.policy.retention import Retention, retention_of

DEFAULTS = GatewaySettings(served_names=("model",))


def gateway(
    model: Annotated[
        Path, typer.Option(help="Checkpoint folder; the simulated engine reads only its tokenizer.")
    ],
    engine: Annotated[str, typer.Option(help="simulated, or vllm.")] = "vllm",
    engine_args: Annotated[
        str, typer.Option(help="Flags for the engine in one string, such as '--max-model-len 4096'.")
    ] = "",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 8000,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(help="Name for clients, may be repeated; the folder's name by default."),
    ] = None,
    api_keys: Annotated[
        Path | None, typer.Option(help="YAML list of keys, made with gateway-key; without, nobody needs one.")
    ] = None,
    allow_anonymous: Annotated[
        bool, typer.Option("--allow-anonymous", help="Listen beyond loopback without keys.")
    ] = False,
    thinking: Annotated[bool, typer.Option(help="Reason unless a request says otherwise.")] = True,
    max_active: Annotated[int, typer.Option(help="Requests in work; more get 429.")] = DEFAULTS.max_active,
    max_waiting: Annotated[
        int, typer.Option(help="Requests waiting in the engine; more get 429.")
    ] = DEFAULTS.max_waiting,
    max_busy: Annotated[
        float, typer.Option(min=0.05, max=1, help="Share of a core beyond which new requests get 429.")
    ] = 0.9,
    min_priority: Annotated[
        int, typer.Option(help="Lowest priority that a request may ask for; lower ones are served first.")
    ] = DEFAULTS.min_priority,
    max_body_mb: Annotated[int, typer.Option(min=1, help="Largest request body.")] = 32,
    max_prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest prompt; the model's context by default.")
    ] = None,
    response_db: Annotated[
        Path | None, typer.Option(help="SQLite file of stored responses; in memory by default.")
    ] = None,
    response_ttl_hours: Annotated[float, typer.Option(min=0.01, help="Life of a stored response.")] = 720.0,
    drain_timeout_s: Annotated[
        float, typer.Option(min=0, help="How long a stop waits for running requests.")
    ] = DEFAULTS.drain_timeout_s,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    access_log: Annotated[
        bool, typer.Option(help="A line of JSON on standard error for every request, without its text.")
    ] = True,
) -> int:
    """Serve Chat Completions, Responses and Messages on one engine."""
    if not model.is_dir():
        raise UserError(f"--model {model}: there is no such folder.")
    if engine == "vllm":  # it would say so after half a minute
        for name in ("config.json", "tokenizer.json"):
            if not (model / name).is_file():
                raise UserError(f"--model {model} has no {name}: name the folder of a checkpoint.")
    if log_level not in ("debug", "info", "warning", "error"):
        raise UserError(f"--log-level {log_level}: choose debug, info, warning or error.")
    _check_database(response_db)
    keys = _keys(api_keys)
    if not keys and not allow_anonymous and not _is_loopback(host):
        raise UserError(
            f"--host {host} is reachable from other machines, so give --api-keys FILE, or --allow-anonymous."
        )
    arguments = _split(engine_args)
    settings = _settings(
        served_names=tuple(served_model_name or (model.resolve().name,)),
        classes=_classes(arguments),
        thinking=thinking,
        max_active=max_active,
        max_waiting=max_waiting,
        max_busy=max_busy,
        min_priority=min_priority,
        max_body_bytes=max_body_mb << 20,
        max_prompt_tokens=max_prompt_tokens,
        response_db=response_db,
        response_ttl_s=response_ttl_hours * 3600,
        drain_timeout_s=drain_timeout_s,
    )
    names = ", ".join(settings.served_names)
    logs.configure(log_level, requests=access_log)
    with listen(host, port) as listener, _runner() as runner:

        def ready(url: str) -> None:
            typer.echo(f"Serving {names} on {url} (status page: {url}/status).")

        try:
            runner.run(serve(engine, model, arguments, settings, keys, listener, ready))
        except asyncio.CancelledError:  # by a signal while the engine was starting
            return 130
        except EngineDead as error:
            typer.echo(f"vllm-deepinfer gateway: {error}", err=True)
            return 1
    return 0


def gateway_key(
    name: Annotated[str, typer.Argument(help="Whose key: letters, digits, dot, dash, underscore.")],
) -> None:
    """Make an API key: its entry for the --api-keys file on standard output, the key on standard error."""
    try:
        key, entry = new_key(name)
    except KeyFileError as error:
        raise UserError(str(error)) from None
    # Not on standard output, which goes into the key file: that would keep the key.
    typer.echo(f"{key}   (shown once; only its hash is kept)", err=True)
    typer.echo(yaml.safe_dump([entry.model_dump(exclude_none=True)], sort_keys=False).rstrip())


def _check_database(path: Path | None) -> None:
    """Better said before an engine starts than after it."""
    if path is None:
        return
    if path.is_dir():
        raise UserError(f"--response-db {path} is a folder: name a file.")
    if not path.parent.is_dir():
        raise UserError(f"--response-db {path}: there is no folder {path.parent}, make it first.")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UserError(f"--response-db {path} cannot be written: name another file.")
    try:
        with closing(sqlite3.connect(path)) as database:
            database.execute("PRAGMA schema_version").fetchone()
    except sqlite3.Error as error:
        raise UserError(f"--response-db {path} is no SQLite file that can be used: {error}.") from None


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError(f"--engine-args: {str(error).lower()}.") from None


def _classes(arguments: list[str]) -> Retention:
    """The traffic classes of the prefix store in an engine's flags; what is wrong there the engine says."""
    for flag, value in itertools.pairwise(arguments):
        if flag.replace("_", "-") == "--kv-transfer-config":
            try:
                extra = json.loads(value)["kv_connector_extra_config"]
                return retention_of(extra.get("classes"), extra.get("default_class"))
            except (AttributeError, KeyError, TypeError, ValueError):
                break
    return Retention()


def _settings(**values: Any) -> GatewaySettings:
    try:
        return GatewaySettings(**values)
    except ValidationError as error:
        raise UserError(str(from_validation(error))) from None


def _keys(path: Path | None) -> KeyRing:
    if path is None:
        return KeyRing()
    try:
        return KeyRing.load(path)
    except KeyFileError as error:
        raise UserError(str(error)) from None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _runner() -> asyncio.Runner:
    try:
        import uvloop
    except ImportError:
        return asyncio.Runner()
    return asyncio.Runner(loop_factory=uvloop.new_event_loop)
