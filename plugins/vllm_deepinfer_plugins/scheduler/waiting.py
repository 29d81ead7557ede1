"""The waiting queue in order of rank: vLLM's loop takes from the front, whatever the front means."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from itertools import count

from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import Request

from vllm_deepinfer.policy.prefill_order import Rank

Entry = tuple[Rank, int, Request]  # the number keeps two requests from being compared


class RankedQueue(RequestQueue):
    """Requests by rank, and by arrival in the queue among equals.

    A rank is computed when a request comes in and kept until `rerank`: adding costs one search, not a sort.
    """

    def __init__(self, rank: Callable[[Request], Rank]) -> None:
        self._rank = rank
        self._entries: list[Entry] = []
        self._keys: dict[str, tuple[Rank, int]] = {}
        self._count = count()

    def rerank(self) -> None:
        """Compute every rank anew: the policy knows more than when they came in."""
        entries = sorted((self._rank(request), number, request) for _, number, request in self._entries)
        self._entries = entries
        self._keys = {request.request_id: (rank, number) for rank, number, request in entries}

    def add_request(self, request: Request) -> None:
        key = (self._rank(request), next(self._count))
        self._keys[request.request_id] = key
        insort(self._entries, (*key, request))

    def pop_request(self) -> Request:
        if not self._entries:
            raise IndexError("pop from an empty queue")
        request = self._entries.pop(0)[2]
        del self._keys[request.request_id]
        return request

    def peek_request(self) -> Request:
        if not self._entries:
            raise IndexError("peek from an empty queue")
        return self._entries[0][2]

    def prepend_request(self, request: Request) -> None:
        """As `add_request`: there is no front but that of the rank."""
        self.add_request(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.add_request(request)

    def remove_request(self, request: Request) -> None:
        key = self._keys.pop(request.request_id, None)
        if key is None:
            raise ValueError(f"request {request.request_id} is not in the queue")
        del self._entries[bisect_left(self._entries, key, key=lambda entry: entry[:2])]

    def remove_requests(self, requests: Iterable[Request]) -> None:
        for request in requests:
            if request.request_id in self._keys:
                self.remove_request(request)

    def __bool__(self) -> bool:
        return bool(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def ranked(self) -> Iterator[tuple[Rank, Request]]:
        """Front to back, with ranks."""
        return ((rank, request) for rank, _, request in self._entries)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, _, request in list(self._entries))
