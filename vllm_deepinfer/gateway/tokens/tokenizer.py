"""PromptTokenizer: rendered prompts to token ids, in parallel, incrementally, and with no way to forge
control tokens.
"""

import asyncio
import json
import logging
import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from deepseek_recipe import Tokenizer

from vllm_deepinfer.gateway.tokens import metrics
from vllm_deepinfer.gateway.tokens.boundaries import cut, rule_for
from vllm_deepinfer.gateway.tokens.cache import PieceCache
from vllm_deepinfer.gateway.tokens.detokenizer import Detokenizer, StreamDetokenizer
from vllm_deepinfer.gateway.tokens.errors import TokenizerError
from vllm_deepinfer.gateway.tokens.pool import EncodePool
from vllm_deepinfer.gateway.tokens.vocabulary import Vocabulary, plain_json

log = logging.getLogger(__name__)

Ranges = Sequence[tuple[int, int]]
PIECE_CHARS = 8_000  # 3 to 4 ms of BPE: best of 1k to 32k for a 1 MB prompt on two cores
INLINE_CHARS = 1_000  # at most 0.5 ms: encoding here is cheaper than handing it to a thread
PLAN_INLINE_CHARS = 64_000  # cutting, hashing and joining take about 6 µs per 1,000 characters


@dataclass(slots=True)
class _Plan:
    """A prompt as parts in order: control-token ids, and ids of text pieces, empty while still missing."""

    parts: list[int | Sequence[int]] = field(default_factory=list)
    holes: list[int] = field(default_factory=list)  # where in `parts` the ids of missing[i] belong
    missing: list[str] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)  # of the missing pieces
    cached_chars: int = 0

    def forget_missing(self) -> None:
        """All of it has been filled in."""
        self.holes, self.missing, self.digests = [], [], []

    def join(self) -> list[int]:
        ids: list[int] = []
        for part in self.parts:
            if isinstance(part, int):
                ids.append(part)
            else:
                ids.extend(part)
        return ids


class PromptTokenizer:
    """Token ids of prompts whose control tokens are known by position, never by spelling.

    `special_ranges` are the half-open code point ranges of the prompt that the template wrote as control
    tokens (`RenderedPrompt.special_ranges` of deepseek-recipe). Only they become control-token ids.
    Everything between them is encoded by a tokenizer that has no control tokens.
    """

    def __init__(
        self,
        tokenizer_json: str,
        *,
        threads: int | None = None,
        cache_bytes: int = 64 << 20,
        max_waiting_chars: int = 64_000_000,
        piece_chars: int = PIECE_CHARS,
    ) -> None:
        parsed = json.loads(tokenizer_json)
        self.vocabulary = Vocabulary(parsed)
        self.cache = PieceCache(cache_bytes, len(self.vocabulary.token_bytes))
        self._piece_chars = piece_chars
        self._rule = rule_for(parsed)
        self._plain = Tokenizer.from_str(plain_json(parsed))
        self._pool = EncodePool(self._plain.encode, threads or os.cpu_count() or 1, max_waiting_chars)
        self._detokenizer = Detokenizer(self.vocabulary)
        if self._rule is None:
            log.warning(
                "No proof covers this tokenizer's pre-tokenizer, so long prompts are tokenised serially; "
                "prompts stay correct. Add a BoundaryRule for it to tokenise in parallel."
            )

    @classmethod
    def from_file(cls, path: str | Path, **options: int) -> "PromptTokenizer":
        """Loads a tokenizer.json, or the one in a checkpoint folder. Raises TokenizerError."""
        file = Path(path)
        file = file / "tokenizer.json" if file.is_dir() else file
        try:
            return cls(file.read_text(encoding="utf-8"), **options)
        except (OSError, KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise TokenizerError(f"{file} is not a readable tokenizer.json ({error!r}).") from error

    @property
    def parallel(self) -> bool:
        """Whether long prompts are cut and tokenised in parallel."""
        return self._rule is not None

    def require(self, spellings: Iterable[str]) -> None:
        """Raises TokenizerError unless the vocabulary has all these control tokens."""
        self.vocabulary.require(spellings)

    async def encode_prompt(self, text: str, special_ranges: Ranges) -> list[int]:
        """Ids of a rendered prompt. Raises TokenizerError and TokenizerBusyError; cancellation stops the
        work.
        """
        if len(text) > PLAN_INLINE_CHARS:
            return await asyncio.wrap_future(self._encode_on_pool(text, special_ranges))
        plan = self._plan(text, special_ranges)
        pending = self._start(plan)
        if pending is not None:
            results: list[array[int]] = await asyncio.wrap_future(pending)
            self._fill(plan, results)
        return plan.join()

    async def encode_plain(self, text: str) -> list[int]:
        """Ids of text that holds no control token, whatever it spells."""
        return await self.encode_prompt(text, ())

    def encode_prompt_blocking(self, text: str, special_ranges: Ranges) -> list[int]:
        """`encode_prompt` for callers without an event loop; parallel and incremental as well."""
        plan = self._plan(text, special_ranges)
        pending = self._start(plan)
        if pending is not None:
            self._fill(plan, pending.result())
        return plan.join()

    def decode(self, ids: Sequence[int], skip_control: bool = False) -> str:
        """Text of ids; control tokens are spelled out or skipped. Raises TokenizerError for an unknown id."""
        return self._detokenizer.decode(ids, skip_control)

    def stream_detokenizer(self, skip_control: bool = False) -> StreamDetokenizer:
        """A detokeniser for one output stream."""
        return self._detokenizer.stream(skip_control)

    def close(self) -> None:
        """Stops the threads. Prompts still waiting are cancelled."""
        self._pool.close()

    def _encode_on_pool(self, text: str, special_ranges: Ranges) -> "Future[list[int]]":
        """Everything on the pool: the event loop is woken once, at the end. Cancelling stops the work."""
        whole: Future[list[int]] = Future()

        def finish(plan: _Plan, results: "Sequence[array[int]]") -> None:
            self._fill(plan, results)
            ids = plan.join()
            if whole.set_running_or_notify_cancel():
                whole.set_result(ids)

        def encoded(plan: _Plan, pending: "Future[list[array[int]]]") -> None:
            if pending.cancelled():
                whole.cancel()
                return
            with _failing(whole):
                finish(plan, pending.result())

        def begin() -> None:
            with _failing(whole):
                plan = self._plan(text, special_ranges)
                pending = self._start(plan)
                if pending is None:
                    finish(plan, ())
                    return
                whole.add_done_callback(lambda _: pending.cancel())
                pending.add_done_callback(lambda done: encoded(plan, done))

        begun = self._pool.call(begin)
        begun.add_done_callback(lambda _: begun.cancelled() and whole.cancel())  # the pool was closed
        return whole

    def _plan(self, text: str, special_ranges: Ranges) -> _Plan:
        plan = _Plan()
        end = 0
        for start, stop in special_ranges:
            if not end <= start < stop <= len(text):
                raise TokenizerError(
                    f"Control token range {start}:{stop} is out of order or outside the prompt."
                )
            self._plan_text(plan, text[end:start])
            plan.parts.append(self._control_id(text[start:stop]))
            end = stop
        self._plan_text(plan, text[end:])
        return plan

    def _plan_text(self, plan: _Plan, text: str) -> None:
        if not text:
            return
        if self._rule is None and len(text) > self._piece_chars:
            metrics.SERIAL_PROMPTS.inc()
        for piece in cut(text, self._rule, self._piece_chars):
            try:
                digest = self.cache.digest(piece)
            except UnicodeEncodeError as error:
                raise TokenizerError(
                    f"The text holds the lone surrogate {piece[error.start]!r}; send valid Unicode instead."
                ) from None
            ids = self.cache.get(digest)
            if ids is None:
                plan.holes.append(len(plan.parts))
                plan.missing.append(piece)
                plan.digests.append(digest)
                ids = array("I")
            else:
                plan.cached_chars += len(piece)
            plan.parts.append(ids)

    def _control_id(self, spelling: str) -> int:
        try:
            return self.vocabulary.control_ids[spelling]
        except KeyError:
            self.vocabulary.require([spelling])
            raise

    def _start(self, plan: _Plan) -> "Future[list[array[int]]] | None":
        chars = sum(map(len, plan.missing))
        if plan.cached_chars:
            metrics.CACHED_CHARS.inc(plan.cached_chars)
        if not chars:
            return None
        metrics.ENCODED_CHARS.inc(chars)
        if chars > INLINE_CHARS:
            return self._pool.run(plan.missing)
        self._fill(plan, [array("I", self._plain.encode(piece)) for piece in plan.missing])
        plan.forget_missing()
        return None

    def _fill(self, plan: _Plan, results: Sequence["array[int]"]) -> None:
        for hole, digest, ids in zip(plan.holes, plan.digests, results, strict=True):
            plan.parts[hole] = ids
            self.cache.put(digest, ids)


@contextmanager
def _failing(future: "Future[list[int]]") -> Iterator[None]:
    """What the body raises is the future's: nobody else would hear of it in a thread."""
    try:
        yield
    except BaseException as error:
        if future.set_running_or_notify_cancel():
            future.set_exception(error)
