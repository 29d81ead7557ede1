"""One answer: engine deltas in, protocol chunks of the recipe package out.

The recipe's processor decodes tokens, splits reasoning, text and tool calls, and matches stop strings. What
is added
here: tokens that end an answer have no text; a stop string that ends inside a multi-token delta ends the
count there; and a count of tokens that includes those whose bytes never became a character.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeAlias

from deepseek_recipe import (
    ChatCompletionChunk,
    ChatCompletionChunkGenerator,
    InferenceChunk,
    InferenceFinishReason,
    MessagesChunkGenerator,
    MessagesStreamEvent,
    ParsingOptions,
    PromptUsage,
    ResponsesChunkGenerator,
    ResponsesStreamEvent,
    StreamProcessor,
    Tokenizer,
)

from vllm_deepinfer.engine import FinishReason, TokenDelta, TokenLogprobs
from vllm_deepinfer.gateway.tokens import StreamDetokenizer

Chunk: TypeAlias = ChatCompletionChunk | ResponsesStreamEvent | MessagesStreamEvent
Generator: TypeAlias = ChatCompletionChunkGenerator | ResponsesChunkGenerator | MessagesChunkGenerator

_REASONS = {FinishReason.STOP: InferenceFinishReason.Stop, FinishReason.LENGTH: InferenceFinishReason.Length}


@lru_cache(maxsize=16)
def _shared_set(ids: tuple[int, ...]) -> frozenset[int]:
    return frozenset(ids)


class OutputParser:
    """Feeds one recipe processor.

    Args:
        generator: makes the chunks of one API; consumed.
        options: how to parse, as conversion of the request gave them.
        tokenizer: decodes token ids.
        eos_token_ids: ids that end an answer; they count and have no text.
        prompt_tokens: length of the prompt, for usage.
        exact: feed token by token, so that text, counts and logprobs stop at the same token. Needed with stop
            strings or logprobs; else a delta of several tokens makes one chunk.
        end_of_reasoning: id of the token that ends the reasoning, for counting what came before it.
        markup: id of the token in every tool tag; with tools it ends the reasoning as well.
        detokenizer: decodes token ids in half the time; not with logprobs, which the processor has to decode.
        fingerprint: `system_fingerprint` of the answer.

    Attributes:
        plain_of: by token id, the JSON text of tokens that may go past the processor while it is `steady`;
            empty when none ever may. See `skip`.
    """

    __slots__ = (
        "_before_markup",
        "_detokenizer",
        "_end_of_reasoning",
        "_eos",
        "_exact",
        "_fingerprint",
        "_held",
        "_json_of",
        "_markup",
        "_processor",
        "_prompt_tokens",
        "_reasoning",
        "_reasons",
        "_spoken",
        "_started",
        "accepted_drafts",
        "cached_tokens",
        "fed",
        "finished",
        "plain_of",
        "reasoning",
        "skipped_reasoning",
        "steady",
        "tokens",
    )

    def __init__(
        self,
        generator: Generator,
        options: ParsingOptions,
        tokenizer: Tokenizer,
        *,
        eos_token_ids: Sequence[int],
        prompt_tokens: int,
        exact: bool,
        end_of_reasoning: int | None = None,
        markup: int | None = None,
        detokenizer: StreamDetokenizer | None = None,
        fingerprint: str | None = None,
    ) -> None:
        self._processor = StreamProcessor(generator, options, tokenizer)
        self._eos = _shared_set(tuple(eos_token_ids))
        self._prompt_tokens = prompt_tokens
        self._exact = exact
        self._detokenizer = detokenizer
        self._end_of_reasoning = end_of_reasoning
        stage = options.thinking_initial_stage
        reasons = stage is not None and stage.starts_in_reasoning()
        self._reasons = end_of_reasoning is not None and reasons
        self._reasoning = 0  # tokens before the end of the reasoning
        self._markup = markup if options.parse_tool_calls else None
        self._before_markup: int | None = None  # of these, how many came before the first tool tag
        self._held = 0  # tokens whose text is not whole characters yet
        self.fed: bytes | None = b""  # JSON text fed since something came out; None: not all of it is text
        self.steady = False  # whether just that came out, so that nothing is held back
        self.reasoning = False  # and whether it came out as reasoning
        self.skipped_reasoning = 0  # reasoning tokens that the processor has not counted
        table = (
            None if options.stop_sequences or options.parse_json_output else detokenizer and detokenizer.table
        )
        line_ends = not (reasons or options.parse_tool_calls)  # else the processor holds them back
        self.plain_of = table.plain_without(self._eos, line_ends) if table else []
        self._json_of = table.json_of if table else []
        self._fingerprint = fingerprint
        self._started = False
        self._spoken = False  # whether something came out last time
        self.finished = False
        self.tokens = 0
        self.cached_tokens = 0
        self.accepted_drafts = 0  # of `tokens`, those that speculation had guessed

    def feed(self, delta: TokenDelta) -> list[Chunk]:
        """Chunks that this delta completes. After `finished`, deltas add nothing.

        Raises: RuntimeError if the processor fails, which ends this answer with an error.
        """
        if self.finished:
            return []
        self.steady = False
        self._note(delta.token_ids)
        before = self.tokens
        chunks = self._feed(delta)
        if delta.accepted_draft_tokens:  # a delta's drafts come first; its end may not count
            self.accepted_drafts += min(delta.accepted_draft_tokens, self.tokens - before)
        if chunks:
            self._spoken = True
        return chunks

    def _feed(self, delta: TokenDelta) -> list[Chunk]:
        ids = delta.token_ids
        if self._started and len(ids) == 1 and delta.finish_reason is None and ids[0] not in self._eos:
            return self._push(ids, delta.logprobs)  # nearly every call, so it comes first
        reason = None if delta.finish_reason is None else _REASONS.get(delta.finish_reason)
        if not delta.token_ids and reason is None:
            return []  # a failure, and nothing to show: the answer has not begun
        chunks: list[Chunk] = [] if self._started else self._begin(delta.cached_tokens)
        if delta.token_ids:
            self._feed_tokens(delta, chunks)
        if reason is not None and not self.finished:
            if self._held:
                chunks += self._processor.push(InferenceChunk.text("", self._held))
            chunks += self._processor.push(InferenceChunk.finish(reason))
            self.finished = True
        return chunks

    def _note(self, ids: Sequence[int]) -> None:
        """Take down what is fed, for the encoder to compare with what comes out.

        If all of it came out, nothing is held back: no markup has begun, not even with a line end.
        """
        if self._spoken:
            self._spoken, self.fed = False, b""
        text = self._json_of[ids[0]] if len(ids) == 1 and 0 <= ids[0] < len(self._json_of) else None
        self.fed = None if text is None or self.fed is None else self.fed + text

    def skip(self, count: int) -> None:
        """Count tokens of `plain_of` that went past the processor, and that its usage therefore lacks.

        They may while it is `steady`: such text has no character that starts any markup, the processor holds
        nothing back, and there is no stop string to be found and no JSON document to be cut out.
        """
        self.tokens += count
        self._reasoning += count * self._reasons
        self.skipped_reasoning += count * self.reasoning

    def reasoning_tokens(self, counted: int) -> int:
        """Tokens of reasoning, given what the processor has counted.

        The processor's count takes a token twice whose text it held back for a while, and may miss equal ones
        in a row. So the tokens before `end_of_reasoning`, or before the tag that opens a tool call, are
        counted here.
        """
        counted += self.skipped_reasoning
        if self._end_of_reasoning is None:
            return counted
        return self._reasoning if self._before_markup is None else self._before_markup

    def _begin(self, cached_tokens: int) -> list[Chunk]:
        self._started = True
        self.cached_tokens = cached_tokens
        usage = PromptUsage(prompt_tokens=self._prompt_tokens, prompt_cache_hit_tokens=cached_tokens)
        ready = InferenceChunk.ready(prompt_usage=usage, system_fingerprint=self._fingerprint)
        return list(self._processor.push(ready))

    def _feed_tokens(self, delta: TokenDelta, chunks: list[Chunk]) -> None:
        ids = delta.token_ids
        silent = isinstance(delta.stop_reason, int) or not self._eos.isdisjoint(ids)
        if not (silent or self._exact) or (self._exact and len(ids) == 1 and not silent):
            chunks += self._push(ids, delta.logprobs)
            return
        last = len(ids) - 1
        for position, token in enumerate(ids):
            if token in self._eos or (position == last and delta.stop_reason == token):
                self.tokens += 1
                continue
            entry = None if delta.logprobs is None else delta.logprobs[position : position + 1]
            chunks += self._push((token,), entry)
            if self.finished:
                return

    def _push(self, ids: Sequence[int], logprobs: Sequence[TokenLogprobs] | None) -> list[Chunk]:
        self.tokens += len(ids)
        if self._reasons:
            self._count_reasoning(ids)
        if self._detokenizer is None:
            chunk = InferenceChunk.tokens(ids, _logprobs(logprobs))
        else:
            self._held += len(ids)
            text = self._detokenizer.push(ids)
            if not text:
                return []
            chunk = InferenceChunk.text(text, self._held)
            self._held = 0
        chunks: list[Chunk] = self._processor.push(chunk)
        self.finished = self._processor.finished
        return chunks

    def _count_reasoning(self, ids: Sequence[int]) -> None:
        for token in ids:
            if token == self._end_of_reasoning:
                self._reasons = False
                return
            if token == self._markup and self._before_markup is None:
                self._before_markup = max(self._reasoning - 1, 0)  # the "<" in front of it is the tag's
            self._reasoning += 1


def _logprobs(entries: Sequence[TokenLogprobs] | None) -> Any:
    if entries is None:
        return None
    return [(entry.logprob, list(entry.top)) for entry in entries]
