"""Documents: endless, repeatable, in the stated mix."""

from collections import Counter
from itertools import islice

from vllm_deepinfer.lessons.encoder import Encoder
from vllm_deepinfer.lessons.stream import MIX, Document, documents, of_kind
from vllm_deepinfer.lessons.vocabulary import tokenizer


def taken(seed: int, count: int) -> list[Document]:
    return list(islice(documents(seed, "heldout", tokenizer()), count))


def test_the_mix_is_kept_from_early_on() -> None:
    assert abs(sum(MIX.values()) - 1) < 1e-9
    tokens: Counter[str] = Counter()
    for document in taken(0, 1500):
        tokens[document.kind] += len(document.tokens)
    for kind, share in MIX.items():
        assert abs(tokens[kind] / tokens.total() - share) < 0.01


def test_a_seed_says_which_documents_come() -> None:
    assert taken(1, 200) == taken(1, 200)
    assert taken(1, 200) != taken(2, 200)


def test_documents_are_well_made() -> None:
    for document in taken(3, 300):
        assert len(document.tokens) == len(document.mask) > 1
        assert document.tokens[0] == 0 and document.tokens.count(0) == 1
        assert not document.mask[0]
        assert any(document.mask)
        assert all(0 <= token < 2048 for token in document.tokens)
        if document.kind in ("code", "prose"):
            assert all(document.mask[1:])
        else:
            assert document.tokens[-1] == 1 and document.mask[-1], document.kind


def test_texts_come_all_before_one_comes_again() -> None:
    encoder = Encoder(tokenizer())
    stream = of_kind("code", 0, "heldout", encoder)
    first: list[tuple[int, ...]] = []
    while len(first) == len(set(first)):
        first.append(tuple(next(stream).tokens))
    from vllm_deepinfer.lessons.corpus import code

    distinct = {piece.text for piece in code("heldout")}
    assert len(first) - 1 >= len(distinct) * 0.95
