"""What a dialect gives the serving path, and the parts of conversion that the three APIs share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import msgspec
from deepseek_recipe import (
    Conversation,
    ConversationRequest,
    ConversionError,
    ConversionOptions,
    DeepseekV4Encoding,
    DeepseekV41Encoding,
    ModelVersion,
    RenderedPrompt,
)

from vllm_deepinfer.engine import SamplingParams, StructuredOutput, Targets
from vllm_deepinfer.gateway.constraints import ToolPolicy, output_constraint
from vllm_deepinfer.gateway.conversion_errors import located
from vllm_deepinfer.gateway.errors import ApiError
from vllm_deepinfer.gateway.fields import EngineFields
from vllm_deepinfer.gateway.retention import NOTHING, Wanted
from vllm_deepinfer.gateway.streaming.parser import Chunk, Generator, OutputParser
from vllm_deepinfer.policy.retention import Retention

Body = dict[str, Any]

_V4, _V41 = DeepseekV4Encoding(), DeepseekV41Encoding()  # 34 µs to make


class StreamEncoder(Protocol):
    """Turns chunks into server-sent events; one object per request.

    Attributes:
        forms: per choice, what stands before and after the text in its last event of plain text, if the next
            one has the same form: plain text may then go past the encoder. It sets `OutputParser.steady`
            after an event that holds just the text that was fed. Empty for an API whose events are numbered.
    """

    forms: dict[int, tuple[bytes, bytes]]

    def encode(self, index: int, chunks: Sequence[Chunk], parser: OutputParser) -> bytes:
        """Events of choice `index`; the last chunk of a finished parser is the choice's last."""
        ...

    def finish(self) -> bytes:
        """Events after the last choice has ended."""
        ...

    def error(self, error: ApiError) -> bytes:
        """Events that end a stream which has begun."""
        ...

    def document(self) -> Body | None:
        """The complete answer, for an API that stores it; after `finish`."""
        ...


class Collector(Protocol):
    """Puts the chunks of one request together into one JSON document."""

    def add(self, index: int, chunks: Sequence[Chunk], parser: OutputParser) -> None:
        """Chunks of choice `index`."""
        ...

    def result(self) -> Body:
        """The document; every choice has ended."""
        ...


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A converted request: all that is needed to run it but the prompt's ids.

    Attributes:
        answer_id, model: reported in the answer; the model's name is the one that was asked for.
        conversation: the recipe's view, with parsing options.
        prompt: text and ranges of its control tokens.
        sampling: without max_tokens, which depends on the prompt's length.
        choices: how many answers to generate.
        stream: whether the client wants events.
        generator: makes the chunk generator of one choice.
        encoder, collector: make the wire format.
        retention: how long the prefix store is to keep the prompt, as the body says.
        targets: latency that the request asks for.
        detached: nobody waits for the answer. settings: what the answer reports of the request beyond the
            recipe.
    """

    answer_id: str
    model: str
    conversation: ConversationRequest
    prompt: RenderedPrompt
    sampling: SamplingParams
    stream: bool
    generator: Callable[[], Generator]
    encoder: Callable[[], StreamEncoder]
    collector: Callable[[], Collector]
    choices: int = 1
    priority: int = 0
    cache_salt: str | None = None
    retention: Wanted = NOTHING
    targets: Targets | None = None
    detached: bool = False
    settings: Body = field(default_factory=dict)

    def sampling_for(self, index: int, max_tokens: int) -> SamplingParams:
        """Sampling parameters of one choice. Choices draw from seeds that follow each other, as in vLLM."""
        seed = self.sampling.seed
        return msgspec.structs.replace(
            self.sampling, max_tokens=max_tokens, seed=None if seed is None else seed + index
        )

    @property
    def exact(self) -> bool:
        """Whether the parser has to see single tokens, see OutputParser."""
        return self.sampling.logprobs is not None or bool(self.conversation.parsing_options.stop_sequences)


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """The model behind this gateway, as conversion needs it.

    Attributes:
        names: what clients may call it; the first is canonical.
        version: selects the prompt encoding and the tool-call dialect.
        thinking: whether a request that says nothing gets reasoning.
        max_model_len: prompt and answer, in tokens.
        classes: of the prefix store's traffic.
    """

    names: Sequence[str]
    version: ModelVersion
    max_model_len: int
    thinking: bool = True
    classes: Retention = field(default_factory=Retention)

    @cached_property
    def options(self) -> ConversionOptions:
        """Options of the recipe's conversion for this model."""
        limit = max(1, self.max_model_len)
        return ConversionOptions(
            default_thinking_mode=self.thinking,
            thinking_max_tokens_upper_bound=limit,
            non_thinking_max_tokens_upper_bound=limit,
        ).with_model_versions_by_name(dict.fromkeys(self.names, self.version))

    def require(self, body: Body) -> str:
        """The model that `body` names. Raises: ApiError 404 for another one, 400 for none."""
        name = body.get("model")
        if not isinstance(name, str):
            raise ApiError(400, f"model: name one of {', '.join(self.names)}.", param="model")
        if name not in self.names:
            raise ApiError(
                404,
                f"the model {name[:100]!r} does not exist here; use {self.names[0]!r}.",
                param="model",
                code="model_not_found",
            )
        return name


def encode_body(body: Body) -> bytes:
    """What the recipe's requests read."""
    return msgspec.json.encode(body)


class _RecipeRequest(Protocol):
    def convert(self, options: ConversionOptions) -> ConversationRequest: ...


def convert(
    make: Callable[[bytes], _RecipeRequest], body: Body, options: ConversionOptions
) -> ConversationRequest:
    """Run the recipe's conversion. Raises: ApiError with the recipe's sentence, or for an image or file."""
    encoded = encode_body(body)
    more_than_text = any(kind in encoded for kind in (b"image", b"file", b"document"))  # types of such parts
    if more_than_text:
        refuse_documents(body)
    try:
        conversation = make(encoded).convert(options)
    except (ConversionError, ValueError) as error:
        raise located(error, body, lambda part: make(encode_body(part)).convert(options)) from None
    if not more_than_text:
        return conversation
    for message in conversation.conversation.messages:
        for source in message.image_sources:
            where = source.path.lstrip(".") or "messages"
            raise ApiError(400, f"{where}: this model reads text only; remove the image.", param=where)
    return conversation


def refuse_documents(body: Body) -> None:
    """Raises: ApiError for a file, which the recipe would leave out."""
    turns = "input" if "input" in body else "messages"
    found = _document(body.get(turns), turns)
    if found is not None:
        raise ApiError(400, f"{found}: this model reads text only; send the file's text.", param=found)


def _document(content: Any, where: str) -> str | None:
    if isinstance(content, dict):
        if content.get("type") in ("file", "input_file", "document"):
            return where
        return _document(content.get("content"), f"{where}.content")
    if isinstance(content, list):
        for number, part in enumerate(content):
            if (found := _document(part, f"{where}.{number}")) is not None:
                return found
    return None


def check_limit(body: Body, name: str, card: ModelCard) -> None:
    """Raises: ApiError unless the field `name` is absent or a number of tokens that the context can hold."""
    value = body.get(name)
    if value is None:
        return
    most = card.max_model_len
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        given = repr(value) if len(repr(value)) <= 60 else "something else"
        raise ApiError(
            400,
            f"{name}: send a whole number from 1 to {most}, the model's context, got {given}.",
            param=name,
        )


def render(request: ConversationRequest) -> RenderedPrompt:
    """The prompt in the encoding of the request's model version."""
    return render_conversation(request.conversation, request.model_version)


def render_conversation(conversation: Conversation, version: ModelVersion) -> RenderedPrompt:
    """The prompt of a conversation in the encoding of a model version."""
    encoding = _V4 if version == ModelVersion.DeepseekV4Pro else _V41
    return encoding.render_conversation(conversation)


def sampling(
    conversation: ConversationRequest,
    fields: EngineFields,
    tools: ToolPolicy,
    constraint: StructuredOutput | None,
) -> SamplingParams:
    """Sampling parameters of a request.

    An explicit temperature or top_p is honoured with reasoning too, where the recipe (as DeepSeek's own API)
    falls
    back to its defaults: a caller that asks for greedy decoding gets it.
    """
    options = conversation.inference_options
    temperature = options.temperature if fields.temperature is None else fields.temperature
    top_p = options.top_p if fields.top_p is None else fields.top_p
    try:
        return SamplingParams(
            temperature=1.0 if temperature is None else temperature,
            top_p=1.0 if top_p is None else top_p,
            top_k=max(0, fields.top_k or 0),
            min_p=fields.min_p or 0.0,
            min_tokens=fields.min_tokens or 0,
            seed=fields.seed if fields.seed is not None else options.seed,
            stop_token_ids=fields.stop_token_ids or (),
            ignore_eos=bool(fields.ignore_eos),
            presence_penalty=fields.presence_penalty or 0.0,
            frequency_penalty=fields.frequency_penalty or 0.0,
            repetition_penalty=fields.repetition_penalty or 1.0,
            logit_bias=fields.bias(),
            logprobs=(options.top_logprobs or 0) if options.logprobs else None,
            structured=output_constraint(conversation, tools, constraint),
        )
    except ValueError as error:  # InvalidRequest is one
        raise ApiError(400, str(error)) from None
