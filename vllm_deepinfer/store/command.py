"""`vllm-deepinfer store`: look after a prefix store. Each command takes its address, see `uri.py`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from vllm_deepinfer.errors import UserError
from vllm_deepinfer.policy.retention import Retention, plan
from vllm_deepinfer.store import codec
from vllm_deepinfer.store.base import Backend, Entry
from vllm_deepinfer.store.errors import CorruptObject, StoreError
from vllm_deepinfer.store.keys import Key
from vllm_deepinfer.store.sweeper import GARBAGE_AGE_S, Sweeper, held
from vllm_deepinfer.store.uri import absent, open_store, size

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Look after a prefix store: a folder, memory:NAME, s3://BUCKET/PREFIX, or tiers with commas.",
)
Address = Annotated[str, typer.Argument(metavar="STORE", help="The store's address.")]
_BATCH = 256
_LARGEST, _MOST = 1 << 30, 100_000  # of a bench: bytes of an object, objects


@app.command()
def stat(store: Address) -> int:
    """What lies in the store, by traffic class."""
    with _opened(store) as backend:
        objects, nbytes, hits, expired = Counter[int](), Counter[int](), Counter[int](), Counter[int]()
        tokens, now = Counter[int](), time.time()
        for entry in _counted(backend, "looking"):
            code = entry.stamp.traffic_class
            objects[code] += 1
            nbytes[code] += entry.nbytes
            hits[code] += entry.stamp.hits
            tokens[code] += entry.key.tokens
            expired[code] += entry.stamp.expires <= now
        names = {c.code: c.name for c in Retention().classes}
        table = Table("class", "objects", "size", "tokens", "hits", "expired", title=store)
        for code in sorted(objects):
            row = (objects, nbytes, tokens, hits, expired)
            counts = [c[code] for c in row]
            table.add_row(names.get(code, str(code)), *_cells(counts))
        table.add_section()
        table.add_row("all", *_cells([c.total() for c in (objects, nbytes, tokens, hits, expired)]))
        Console().print(table)
        free = backend.free_bytes()
        if free is not None:
            typer.echo(f"free: {_size(free)}")
    return 0


def _cells(counts: list[int]) -> list[str]:
    return [_size(c) if i == 1 else f"{c:,}" for i, c in enumerate(counts)]


@app.command("ls")
def ls(
    store: Address,
    limit: Annotated[int, typer.Option(min=1, help="Show at most so many.")] = 50,
    longest: Annotated[
        bool, typer.Option("--longest", help="Deepest runs first, not the last used.")
    ] = False,
) -> int:
    """Objects, the last used first."""
    with _opened(store) as backend:
        entries = list(_counted(backend, "looking"))
        order = (lambda e: -e.key.start) if longest else (lambda e: -e.stamp.last_use)
        table = Table("key", "tokens", "size", "hits", "last use", "expires in")
        for entry in sorted(entries, key=order)[:limit]:
            start, end = entry.key.start, entry.key.start + entry.key.tokens
            left = timedelta(seconds=int(entry.stamp.expires - time.time()))
            used = datetime.fromtimestamp(entry.stamp.last_use).isoformat(" ", "seconds")
            table.add_row(
                entry.key.digest.hex()[:16],
                f"{start:,}–{end:,}",
                _size(entry.nbytes),
                str(entry.stamp.hits),
                used,
                str(left) if left > timedelta(0) else "expired",
            )
        Console().print(table)
        if len(entries) > limit:
            typer.echo(f"{len(entries) - limit:,} more; --limit shows them.")
    return 0


@app.command()
def verify(
    store: Address,
    delete: Annotated[bool, typer.Option("--delete", help="Remove what is damaged.")] = False,
) -> int:
    """Read every object and check every byte. Exit status 1 if one is damaged."""
    damaged: list[tuple[Key, str]] = []
    with _opened(store) as backend:
        entries = list(_counted(backend, "looking"))
        with _bar("checking", len(entries)) as advance:
            for entry in entries:
                why = _damage(backend, entry.key)
                if why is not None:
                    damaged.append((entry.key, why))
                advance(1)
        for key, why in damaged:
            typer.echo(f"{key.digest.hex()[:16]}: {why}")
        if delete and damaged:
            backend.delete([key for key, _ in damaged])
    typer.echo(
        f"{len(entries):,} objects, {len(damaged):,} damaged{', removed' if delete and damaged else ''}."
    )
    return 1 if damaged else 0


def _damage(backend: Backend, key: Key) -> str | None:
    blob = backend.get(key)
    if blob is None:
        return None  # it went meanwhile
    with blob:
        try:
            codec.verify(blob.data, key)
        except CorruptObject as error:
            return str(error)
    return None


@app.command()
def gc(
    store: Address,
    capacity: Annotated[
        str | None, typer.Option(help="Bring it down to 90 % of this, such as 500GiB, if it holds more.")
    ] = None,
    garbage_age: Annotated[
        float, typer.Option(min=0, help="Seconds after which an unfinished object is a dead writer's.")
    ] = GARBAGE_AGE_S,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
) -> int:
    """Remove expired objects, leftovers of crashes, and what exceeds the capacity; say what went and why."""
    limit = None if capacity is None else size(capacity, "--capacity")
    with _opened(store) as backend:
        if dry_run:
            entries = list(_counted(backend, "looking"))
            reasons = Counter(str(r.reason) for r in plan(held(entries), time.time(), limit, Retention()))
            for reason, count in reasons.items():
                typer.echo(f"would remove {count:,} {reason}")
            typer.echo(f"{len(entries) - reasons.total():,} objects would be left.")
            return 0
        with _bar("removing", None) as advance:
            last = [0]

            def progress(done: int, total: int) -> None:
                advance(done - last[0], total)
                last[0] = done

            result = Sweeper(backend, limit, Retention()).sweep(progress, garbage_age)
    for reason, count in result.removed.items():
        typer.echo(f"removed {count:,} {reason}, {_size(result.removed_bytes[reason])}")
    if result.garbage.objects:
        typer.echo(f"removed {result.garbage.objects:,} leftovers, {_size(result.garbage.nbytes)}")
    typer.echo(f"{result.objects:,} objects, {_size(result.nbytes)} are left.")
    return 0


@app.command()
def rm(
    store: Address,
    keys: Annotated[list[str] | None, typer.Argument(metavar="KEY…", help="As ls shows them.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Remove every object.")] = False,
) -> int:
    """Remove objects by the first characters of their keys, at least eight, or all of them."""
    prefixes = [key.lower() for key in keys or []]
    if everything == bool(prefixes):
        raise UserError("Name keys to remove, or give --all, not both and not neither.")
    for prefix in prefixes:
        if len(prefix) < 8:
            raise UserError(f"The key {prefix!r} is too short; give at least its first eight characters.")
    with _opened(store) as backend:
        entries = list(_counted(backend, "looking"))
        doomed = [e.key for e in entries if everything or e.key.digest.hex().startswith(tuple(prefixes))]
        missing = [p for p in prefixes if not any(k.digest.hex().startswith(p) for k in doomed)]
        if missing:
            raise UserError(f"The store has no key that begins with {missing[0]!r}.")
        removed = 0
        with _bar("removing", len(doomed)) as advance:
            for start in range(0, len(doomed), _BATCH):
                batch = doomed[start : start + _BATCH]
                removed += sum(backend.delete(batch))
                advance(len(batch))
    typer.echo(f"removed {removed:,} objects.")
    return 0


@app.command()
def bench(
    store: Address,
    object_size: Annotated[str, typer.Option(help="Of each object.")] = "1MiB",
    total: Annotated[str, typer.Option(help="Written and read altogether; removed afterwards.")] = "256MiB",
) -> int:
    """Write, look up and read objects in this very store, every byte checked, and remove them again."""
    from vllm_deepinfer.store.probe import probe

    nbytes, whole = size(object_size, "--object-size"), size(total, "--total")
    count = max(1, whole // nbytes)
    if nbytes > _LARGEST or count > _MOST:
        raise UserError(
            f"{count:,} objects of {_size(nbytes)} are no measurement; write an --object-size up to "
            f"{_size(_LARGEST)}, and a --total of at most {_MOST:,} of them."
        )
    with _opened(store, make=True) as backend:
        free = backend.free_bytes()
        if free is not None and count * nbytes > free:
            raise UserError(f"The store has {_size(free)} free; write a --total below that.")
        with _bar("measuring", 3 * count) as advance:
            result = probe(backend, count, nbytes, advance)
    table = Table("", "MB/s", "median ms", "p99 ms", title=f"{store}: {count} objects of {_size(nbytes)}")
    for row in result:
        rate = "" if row.mb_per_s is None else f"{row.mb_per_s:,.0f}"
        table.add_row(row.name, rate, f"{row.median_ms:.3f}", f"{row.p99_ms:.3f}")
    Console().print(table)
    return 0


@contextmanager
def _opened(address: str, make: bool = False) -> Iterator[Backend]:
    missing = None if make else absent(address)
    if missing is not None:
        raise UserError(f"There is no store at {missing}; an engine makes one, or correct the address.")
    backend = open_store(address)
    try:
        yield backend
    except (StoreError, OSError) as error:
        raise UserError(f"The store {address} does not work: {str(error).rstrip('.')}.") from error
    finally:
        backend.close()


def _counted(backend: Backend, what: str) -> Iterator[Entry]:
    """A scan with a counter: how many there are is known at its end only."""
    with _bar(what, None) as advance:
        for entry in backend.scan():
            advance(1)
            yield entry


class _Advance:
    def __init__(self, progress: Progress, task: object) -> None:
        self._progress, self._task = progress, task

    def __call__(self, count: int, total: int | None = None) -> None:
        if total is not None:
            self._progress.update(self._task, total=total)  # type: ignore[arg-type]
        self._progress.advance(self._task, count)  # type: ignore[arg-type]


@contextmanager
def _bar(what: str, total: int | None) -> Iterator[_Advance]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield _Advance(progress, progress.add_task(what, total=total))


def _size(nbytes: int) -> str:
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
