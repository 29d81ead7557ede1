"""Runner: a converted request into the engine, and out of it again if nobody wants it any more."""

from __future__ import annotations

from collections.abc import Sequence

from deepseek_recipe import ConversionError, RenderedPrompt, Tokenizer

from vllm_deepinfer.engine import Engine, EngineError, GenerateRequest, InvalidRequest
from vllm_deepinfer.gateway.dialects.base import Prepared
from vllm_deepinfer.gateway.errors import ApiError, from_conversion, from_engine
from vllm_deepinfer.gateway.streaming.exchange import Choice, Exchange
from vllm_deepinfer.gateway.streaming.hub import StepHub
from vllm_deepinfer.gateway.streaming.parser import OutputParser
from vllm_deepinfer.gateway.tokens import PromptTokenizer, TokenizerBusyError, TokenizerError


class Runner:
    """Submits requests to one engine.

    Args:
        engine: started.
        hub: delivers the answers.
        prompts: text to ids. output: ids to text, for the parsers.
        max_prompt_tokens: longer prompts are refused; None: only the model's context limits them.
    """

    def __init__(
        self,
        engine: Engine,
        hub: StepHub,
        prompts: PromptTokenizer,
        output: Tokenizer,
        max_prompt_tokens: int | None = None,
    ) -> None:
        self.engine = engine
        self.hub = hub
        self.prompts = prompts
        self._output = output
        self._end_of_reasoning = prompts.vocabulary.control_ids["</think>"]
        self._markup = prompts.vocabulary.control_ids["｜DSML｜"]
        self._max_prompt_tokens = max_prompt_tokens

    async def encode(self, prompt: RenderedPrompt) -> list[int]:
        """Ids of a prompt. Raises: ApiError, 429 when too much text waits for tokenisation."""
        try:
            return await self.prompts.encode_prompt(prompt.prompt, prompt.special_ranges)
        except TokenizerBusyError as error:
            raise ApiError(429, str(error), code="tokenizer_busy", retry_after_s=1.0) from None
        except TokenizerError as error:
            raise ApiError(400, str(error)) from None

    async def submit(
        self, prepared: Prepared, ids: Sequence[int], exchange: Exchange, cache_salt: str | None
    ) -> list[str]:
        """Start every choice; the exchange gets the rest. Returns the engine's request ids.

        Raises: ApiError; then no choice is left in the engine.
        """
        requests = self._requests(prepared, ids, cache_salt)
        exchange.account.prompt_tokens = len(ids)
        started: list[str] = []
        try:
            for index, request in enumerate(requests):
                self.hub.add(Choice(request.request_id, index, self._parser(prepared, len(ids)), exchange))
                started.append(request.request_id)
                await self.engine.submit(request, self.hub.sink)
        except BaseException as error:
            self.hub.abort(started)
            if isinstance(error, EngineError):
                raise from_engine(error) from None
            raise
        return started

    def _requests(
        self, prepared: Prepared, ids: Sequence[int], cache_salt: str | None
    ) -> list[GenerateRequest]:
        context = self.engine.info.max_model_len
        if self._max_prompt_tokens is not None and len(ids) > self._max_prompt_tokens:
            raise ApiError(
                400,
                f"the prompt has {len(ids)} tokens, and {self._max_prompt_tokens} are allowed; shorten it.",
                code="context_length_exceeded",
            )
        try:
            max_tokens = prepared.conversation.resolve_max_tokens(len(ids), context)
        except ConversionError as error:
            refusal = from_conversion(error)
            refusal.code = "context_length_exceeded"
            raise refusal from None
        try:
            return [
                GenerateRequest(
                    request_id=f"{prepared.answer_id}-{index}",
                    prompt_token_ids=ids,
                    sampling=prepared.sampling_for(index, max_tokens),
                    priority=prepared.priority,
                    cache_salt=cache_salt,
                    targets=prepared.targets,
                    traffic_class=prepared.retention.traffic_class,
                    cache_ttl_s=prepared.retention.ttl_s,
                )
                for index in range(prepared.choices)
            ]
        except InvalidRequest as error:
            raise from_engine(error) from None

    def _parser(self, prepared: Prepared, prompt_tokens: int) -> OutputParser:
        return OutputParser(
            prepared.generator(),
            prepared.conversation.parsing_options,
            self._output,
            eos_token_ids=self.engine.info.eos_token_ids,
            prompt_tokens=prompt_tokens,
            exact=prepared.exact,
            end_of_reasoning=self._end_of_reasoning,
            markup=self._markup,
            detokenizer=None if prepared.sampling.logprobs is not None else self.prompts.stream_detokenizer(),
        )
