"""Clients that stream without end, and compare each answer with what its prompt was answered in peace."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

WORDS = ["river", "stone", "cloud", "lamp", "orchard", "seven", "window", "harbour", "copper", "violin"]
RETRY_S = 0.2


class Traffic:
    """Streams of chat completions from a thread of its own.

    Args:
        urls: of the gateways; change the list at any time.
        streams: at once.
        tokens: of an answer, from and to. prompts: how many different ones.

    Attributes:
        counts: ``answered``; ``lost``: accepted, and then ended with an error or not at all; ``wrong``: other
            text or number of tokens than in peace; ``cut``: the client's own gateway was killed, and it asked
            another; ``refused``: not accepted (429, 503), asked again later; ``unconnected``: nobody
            listened.
        killed: when each url's gateway was last killed, by `time.monotonic`.
        errors: what the lost and the wrong ones saw.
    """

    def __init__(
        self,
        urls: list[str],
        model: str,
        *,
        streams: int = 8,
        tokens: tuple[int, int] = (20, 160),
        prompts: int = 24,
    ) -> None:
        self.urls, self.killed = urls, dict[str, float]()
        self.counts: Counter[str] = Counter()
        self.errors: list[str] = []
        self._model, self._streams = model, streams
        rng = random.Random(1)
        self._prompts = [
            (" ".join(rng.choices(WORDS, k=rng.randint(1, 60))), rng.randint(*tokens)) for _ in range(prompts)
        ]
        self._peace: dict[int, tuple[str, int]] = {}
        self._heard: dict[int, float] = {}  # by stream: when its newest token came
        self._marks: set[int] = set()  # streams without a token since `mark`
        self._since, self._longest = 0.0, 0.0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)
        self._failure: BaseException | None = None

    @contextmanager
    def flowing(self) -> Iterator[Traffic]:
        """All streams run; in the end each of them has ended."""
        self._thread.start()
        assert self._ready.wait(600) and self._failure is None, self._failure
        try:
            yield self
        finally:
            self._stop.set()
            self._thread.join(400)
            assert not self._thread.is_alive(), "some request never ended"

    def mark(self) -> None:
        """From now on, watch how long streams wait for a token."""
        with self._lock:
            self._since, self._longest = time.monotonic(), 0.0
            self._marks = set(self._heard)

    def recovered(self) -> float | None:
        """The longest that any stream has waited for a token since `mark`; None: one of those that were under
        way then still waits for its first."""
        with self._lock:
            return None if self._marks else self._longest

    # In the thread

    async def _main(self) -> None:
        timeout = httpx.Timeout(300, connect=5)
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=timeout, limits=limits, trust_env=False) as client:
            try:
                for at in range(len(self._prompts)):
                    self._peace[at] = await self._ask(client, self.urls[0], at, -1)
            except BaseException as error:
                self._failure = error
                raise
            finally:
                self._ready.set()
            await asyncio.gather(*(self._endless(client, stream) for stream in range(self._streams)))

    async def _endless(self, client: httpx.AsyncClient, stream: int) -> None:
        rng = random.Random(stream)
        while not self._stop.is_set():
            at = rng.randrange(len(self._prompts))
            while not await self._once(client, rng.choice(list(self.urls)), at, stream):
                await asyncio.sleep(RETRY_S)

    async def _once(self, client: httpx.AsyncClient, url: str, at: int, stream: int) -> bool:
        """Whether the prompt was answered; False: it is to be asked again."""
        began = time.monotonic()
        try:
            answer = await self._ask(client, url, at, stream)
        except httpx.ConnectError:
            self.counts["unconnected"] += 1
            return False
        except httpx.HTTPStatusError as error:
            self.counts["refused"] += 1
            self.errors.append(f"refused: {error.response.text[:200]}")
            return False
        except (httpx.HTTPError, Broken) as error:
            died = self.killed.get(url, 0.0) >= began and not isinstance(error, Broken)
            self.counts["cut" if died else "lost"] += 1
            if not died:
                self.errors.append(f"lost: {type(error).__name__} {error}"[:300])
            return False
        finally:
            self._went_on(stream)
            self._heard.pop(stream, None)
        self.counts["answered"] += 1
        if answer != self._peace[at]:
            self.counts["wrong"] += 1
            self.errors.append(f"wrong: {answer} instead of {self._peace[at]}"[:600])
        return True

    async def _ask(self, client: httpx.AsyncClient, url: str, at: int, stream: int) -> tuple[str, int]:
        """Text and number of tokens."""
        text, tokens, reason = "", -1, None
        prompt, limit = self._prompts[at]
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": limit,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                await response.aread()
                response.raise_for_status()
            if stream >= 0:
                self._heard[stream] = time.monotonic()
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event: dict[str, Any] = json.loads(line[6:])
                if "error" in event:
                    raise Broken(str(event["error"]))
                self._went_on(stream)
                for choice in event.get("choices", ()):
                    delta = choice["delta"]
                    text += (delta.get("reasoning_content") or "") + (delta.get("content") or "")
                    reason = choice["finish_reason"] or reason
                if event.get("usage"):
                    tokens = event["usage"]["completion_tokens"]
        whole = (reason == "length" and tokens == limit) or (reason == "stop" and 0 < tokens < limit)
        if not whole:
            raise Broken(f"it ended by {reason} after {tokens} of {limit} tokens")
        return text, tokens

    def _went_on(self, stream: int) -> None:
        with self._lock:
            now = time.monotonic()
            if stream in self._heard:
                self._longest = max(self._longest, now - max(self._heard[stream], self._since))
                self._heard[stream] = now
            self._marks.discard(stream)


class Broken(Exception):
    """An answer that did not come to its end."""
