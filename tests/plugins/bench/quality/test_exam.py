"""Questions are turns of held-out lessons; answers are counted by topic."""

from __future__ import annotations

from vllm_deepinfer_plugins.bench.quality.exam import LONG, SPARE, Answer, Question, questions, scores

from vllm_deepinfer.lessons.encoder import Encoder
from vllm_deepinfer.lessons.vocabulary import tokenizer

ENCODER = Encoder(tokenizer())
ASKED = questions(ENCODER, {"tools": 4, "json": 4, "retrieval": 4, "arithmetic": 6}, 1)


def right(question: Question) -> Answer:
    ids, _ = ENCODER.lesson(question.lesson)
    begin = len(question.prompt)
    return Answer(tuple(ids[begin : ids.index(ENCODER.eos, begin) + 1]), True)


def test_the_prompt_is_the_lesson_up_to_the_answer_which_fits() -> None:
    for question in ASKED:
        ids, mask = ENCODER.lesson(question.lesson)
        assert tuple(ids[: len(question.prompt)]) == question.prompt
        assert mask[len(question.prompt)] and not mask[len(question.prompt) - 1]
        assert len(right(question).ids) == question.most - SPARE


def test_topics() -> None:
    topics = {question.topic for question in ASKED}
    assert topics == {"tools", "tool_calls", "json", "retrieval", "arithmetic"} | {
        f"retrieval_{tokens}" for tokens in LONG
    }
    longest = max(len(question.prompt) + question.most for question in ASKED)
    assert 7500 < longest <= 8192
    for question in ASKED:
        called = bool(question.lesson.messages[question.turn].get("tool_calls"))
        assert called == (question.topic == "tool_calls")


def test_waves_follow_the_turns() -> None:
    for question in ASKED:
        assert question.lesson.answers[question.wave] == question.turn


def test_right_answers_score_all_and_wrong_ones_nothing() -> None:
    for score in scores(ENCODER, ASKED, [right(question) for question in ASKED]).values():
        assert score.asked == score.exact == score.well_formed > 0
        assert score.shares == {"asked": score.asked, "well_formed": 1.0, "exact": 1.0}
    wrong = [Answer((ENCODER.eos,), True)] * len(ASKED)
    assert all(score.exact == score.well_formed == 0 for score in scores(ENCODER, ASKED, wrong).values())


def test_half_right() -> None:
    asked = [question for question in ASKED if question.topic == "retrieval"][:4]
    answers = [right(asked[0]), *[Answer(tuple(ENCODER.text("no")), True)] * 3]
    score = scores(ENCODER, asked, answers)["retrieval"]
    assert score.shares == {"asked": 4, "well_formed": 1.0, "exact": 0.25}
