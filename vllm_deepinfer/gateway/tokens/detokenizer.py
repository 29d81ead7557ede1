"""Token ids back to text: whole outputs, and streams whose tokens may end in the middle of a character."""

import codecs
import json
import re
from collections.abc import Sequence

from vllm_deepinfer.gateway.tokens.errors import TokenizerError
from vllm_deepinfer.gateway.tokens.vocabulary import Vocabulary

_MARKUP = re.compile("[<>｜]")
_BEFORE_MARKUP = re.compile("[<>｜\n\r]")  # tool calls begin with line ends
_Utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The table from ids to bytes of one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.bytes_of = vocabulary.token_bytes
        self.text_of = [_complete_text(data) for data in self.bytes_of]
        self.control = frozenset(vocabulary.control_ids.values())
        self.json_of = [
            None if text is None or token in self.control or _MARKUP.search(text) else _escaped(text)
            for token, text in enumerate(self.text_of)
        ]
        """For tokens of whole characters that are part of no markup, that text inside a JSON string."""
        self.plain_of = [
            None if text is None or escaped is None or _BEFORE_MARKUP.search(text) else escaped
            for text, escaped in zip(self.text_of, self.json_of, strict=True)
        ]
        """`json_of` for tokens of plain text: nor does any markup start with their characters."""
        self._plain_without: dict[tuple[frozenset[int], bool], list[bytes | None]] = {}

    def plain_without(self, ids: frozenset[int], line_ends: bool = False) -> list[bytes | None]:
        """`plain_of` with nothing for these ids, such as those that end an answer; made once per set.

        With `line_ends`, those are plain text too: for an answer in which no markup begins with one.
        """
        found = self._plain_without.get((ids, line_ends))
        if found is None:
            table = self.json_of if line_ends else self.plain_of
            found = [None if token in ids else text for token, text in enumerate(table)]
            self._plain_without[ids, line_ends] = found
        return found

    def decode(self, ids: Sequence[int], skip_control: bool = False) -> str:
        """Text of ids, invalid UTF-8 as U+FFFD. Raises TokenizerError for an id that names no token."""
        data = bytearray()
        for token in ids:
            if skip_control and token in self.control:
                continue
            token_bytes = self.bytes_of[token] if 0 <= token < len(self.bytes_of) else None
            if token_bytes is None:
                raise TokenizerError(
                    f"Token id {token} is not in the vocabulary of {len(self.bytes_of)} tokens."
                )
            data += token_bytes
        return data.decode(errors="replace")

    def stream(self, skip_control: bool = False) -> "StreamDetokenizer":
        """A detokeniser for one output."""
        return StreamDetokenizer(self, skip_control)


class StreamDetokenizer:
    """One output stream: the concatenation of everything `push` and `finish` return is what `decode` would
    return.

    A character whose bytes come in several tokens is held back until it is whole. A control token ends it:
    bytes of an unfinished character before one become U+FFFD, as in `decode`. An id that names no token,
    which a model with a padded embedding can sample, becomes U+FFFD too.
    """

    __slots__ = ("_decoder", "_pending", "_skip", "table")

    def __init__(self, table: Detokenizer, skip_control: bool) -> None:
        self.table = table
        self._skip = table.control if skip_control else frozenset()
        self._decoder = _Utf8(errors="replace")
        self._pending = False  # whether the decoder holds back bytes

    def push(self, ids: Sequence[int]) -> str:
        """Text that became final with these ids."""
        if not self._pending:
            text_of = self.table.text_of
            if len(ids) == 1 and not self._skip:  # nearly every call
                whole = text_of[ids[0]] if 0 <= ids[0] < len(text_of) else None
                return self._push_bytes(ids) if whole is None else whole
            try:
                text = "".join([text_of[token] for token in ids if token not in self._skip])  # type: ignore[misc]
            except (TypeError, IndexError):
                pass  # a token that is not whole characters, or no token: the slow path
            else:
                return text
        return self._push_bytes(ids)

    def finish(self) -> str:
        """Text of a character that never became whole; call once, at the end of the output."""
        self._pending = False
        return self._decoder.decode(b"", final=True)

    def _push_bytes(self, ids: Sequence[int]) -> str:
        table = self.table.bytes_of
        data = bytearray()
        for token in ids:
            if token not in self._skip:
                data += (table[token] if 0 <= token < len(table) else None) or b"\xef\xbf\xbd"
        text = self._decoder.decode(bytes(data))
        self._pending = bool(self._decoder.getstate()[0])
        return text


def _escaped(text: str) -> bytes:
    return json.dumps(text, ensure_ascii=False)[1:-1].encode()


def _complete_text(data: bytes | None) -> str | None:
    try:
        return None if data is None else data.decode()
    except UnicodeDecodeError:
        return None
