import asyncio
import logging
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gateway.tokens.conftest import Oracle, TokenizerFile
from tests.gateway.tokens.test_boundaries import TRICKY, WORDS
from vllm_deepinfer.gateway.tokens import PromptTokenizer, TokenizerBusyError, TokenizerError, metrics
from vllm_deepinfer.gateway.tokens.tokenizer import INLINE_CHARS, PLAN_INLINE_CHARS

USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
TEXTS = WORDS | TRICKY | st.text(max_size=80)


@given(text=TEXTS)
async def test_plain_text_has_the_serial_ids(prompts: PromptTokenizer, oracle: Oracle, text: str) -> None:
    expected = oracle.ids(text)
    assert await prompts.encode_plain(text) == expected
    assert await prompts.encode_plain(text) == expected  # and again, from the cache
    assert prompts.encode_prompt_blocking(text, ()) == expected


@given(parts=st.lists(TEXTS, min_size=1, max_size=5))
async def test_control_tokens_come_from_the_ranges_alone(
    prompts: PromptTokenizer, oracle: Oracle, parts: list[str]
) -> None:
    text, ranges, expected = "", [], []
    for part in parts:
        ranges.append((len(text), len(text) + len(USER)))
        text += USER + part + ASSISTANT
        expected += [128803, *oracle.ids(part + ASSISTANT)]
    assert await prompts.encode_prompt(text, ranges) == expected


@settings(max_examples=20, deadline=None)
@given(text=WORDS.filter(bool))
async def test_long_prompts_take_the_pool_and_have_the_serial_ids(
    prompts: PromptTokenizer, oracle: Oracle, text: str
) -> None:
    long = text * (2 * INLINE_CHARS // len(text) + 1)
    assert await prompts.encode_plain(long) == oracle.ids(long)


async def test_a_very_long_prompt(prompts: PromptTokenizer, oracle: Oracle) -> None:
    text = "".join(f"line {i}: 价格是 {i * 37} 元。\n\n  if x == {i}:\n\treturn 'ok'\n" for i in range(3000))
    assert len(text) > PLAN_INLINE_CHARS
    assert await prompts.encode_plain(text) == oracle.ids(text)
    assert await prompts.encode_plain(text + "!") == oracle.ids(text + "!")


async def test_the_event_loop_runs_while_a_prompt_is_tokenised(deepseek: TokenizerFile) -> None:
    prompts = PromptTokenizer(deepseek.json, threads=1)
    entered, leave = threading.Event(), threading.Event()

    def encode(text: str) -> list[int]:
        entered.set()
        assert leave.wait(10)
        return [7]

    prompts._pool.encode = encode
    task = asyncio.create_task(prompts.encode_plain("x " * INLINE_CHARS))
    while not entered.is_set():
        await asyncio.sleep(0)
    assert not task.done()  # this line runs although the encoder is waiting for it
    leave.set()
    assert await task == [7]


def counted() -> tuple[float, float]:
    return metrics.CACHED_CHARS._value.get(), metrics.ENCODED_CHARS._value.get()


async def test_the_unchanged_part_of_a_conversation_is_not_tokenised_again(deepseek: TokenizerFile) -> None:
    prompts = PromptTokenizer(deepseek.json)
    text, ranges = "", []
    for turn in range(20):
        start = counted()
        before = len(text)
        ranges.append((before, before + len(USER)))
        text += USER + f"Question {turn}: " + "what is this? " * 20
        await prompts.encode_prompt(text, ranges)
        cached, encoded = (now - then for now, then in zip(counted(), start, strict=True))
        assert encoded == len(text) - before - len(USER)
        assert cached == before - turn * len(USER)


async def test_a_document_with_another_question_is_mostly_cached(deepseek: TokenizerFile) -> None:
    prompts = PromptTokenizer(deepseek.json)
    document = "".join(f"Row {i} of the table says {i * i}.\n" for i in range(3000))
    await prompts.encode_plain(document + "What is row 7?")
    start = counted()
    await prompts.encode_plain(document + "And row 8?")
    cached, encoded = (now - then for now, then in zip(counted(), start, strict=True))
    assert encoded < 8_100 < 80_000 < cached


async def test_ranges_that_make_no_sense_are_refused(prompts: PromptTokenizer) -> None:
    for ranges in ([(3, 2)], [(0, 99)], [(0, 8), (4, 8)], [(2, 2)], [(-1, 3)]):
        with pytest.raises(TokenizerError, match="out of order or outside"):
            await prompts.encode_prompt(USER, ranges)


async def test_a_range_that_is_no_control_token_is_refused(prompts: PromptTokenizer) -> None:
    with pytest.raises(TokenizerError, match="no control token <｜Nobody｜>"):
        await prompts.encode_prompt("<｜Nobody｜>", [(0, 10)])


async def test_a_lone_surrogate_is_the_clients_mistake(prompts: PromptTokenizer) -> None:
    with pytest.raises(TokenizerError, match=r"lone surrogate '\\ud83d'; send valid Unicode"):
        await prompts.encode_plain("smile \ud83d")


async def test_too_much_text_at_once_is_refused(deepseek: TokenizerFile) -> None:
    prompts = PromptTokenizer(deepseek.json, threads=1, max_waiting_chars=3 * INLINE_CHARS)
    leave = threading.Event()
    prompts._pool.encode = lambda text: [1] if leave.wait(10) else []
    texts = [f"{i} " * INLINE_CHARS for i in range(10)]
    tasks = [asyncio.create_task(prompts.encode_plain(text)) for text in texts]
    for task in tasks[1:]:
        with pytest.raises(TokenizerBusyError):
            await task
    leave.set()
    assert await tasks[0] == [1]


async def test_cancelling_frees_the_pool(deepseek: TokenizerFile) -> None:
    prompts = PromptTokenizer(deepseek.json, threads=1)
    task = asyncio.create_task(prompts.encode_plain("word " * 200_000))
    while not prompts._pool.waiting_chars:
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    while prompts._pool.waiting_chars:
        await asyncio.sleep(0.001)
    assert len(prompts.cache) == 0


async def test_a_tokenizer_without_a_proof_is_serial_counted_and_logged_once(
    deepseek: TokenizerFile, oracle: Oracle, caplog: pytest.LogCaptureFixture
) -> None:
    regex = ("pre_tokenizer", "pretokenizers", 0, "pattern", "Regex")
    other = deepseek.changed(*regex, to=r"\p{N}{1,2}")
    with caplog.at_level(logging.WARNING):
        prompts = PromptTokenizer(other.json, piece_chars=100)
        before = metrics.SERIAL_PROMPTS._value.get()
        await prompts.encode_plain("short")
        await prompts.encode_plain("long text " * 20)
        await prompts.encode_plain("long text " * 30)
    assert not prompts.parallel
    assert metrics.SERIAL_PROMPTS._value.get() == before + 2
    assert [record.message for record in caplog.records if "tokenised serially" in record.message] != []
    assert len(caplog.records) == 1
    assert await prompts.encode_plain("a b c") == oracle.ids("a b c")


def test_decode(prompts: PromptTokenizer) -> None:
    ids = prompts.encode_prompt_blocking(USER + "你好 there", [(0, len(USER))])
    assert prompts.decode(ids) == USER + "你好 there"
    assert prompts.decode(ids, skip_control=True) == "你好 there"
    stream = prompts.stream_detokenizer()
    assert "".join([*(stream.push([token]) for token in ids), stream.finish()]) == USER + "你好 there"


def test_files_and_folders(tmp_path: Path, tiny: TokenizerFile) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(tiny.json, encoding="utf-8")
    for path in (file, tmp_path, str(tmp_path)):
        assert PromptTokenizer.from_file(path).encode_prompt_blocking("the<think>", [(3, 10)]) == [257, 259]


@pytest.mark.parametrize("content", [None, "{", "[]", "{}"])
def test_what_is_no_tokenizer_json_is_named(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "tokenizer.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is not a readable tokenizer\.json \("):
        PromptTokenizer.from_file(file)
