"""Facts are sentences, and hang together."""

from vllm_deepinfer.lessons.generator import lesson
from vllm_deepinfer.lessons.generator.facts import TOPICS


def test_every_thing_is_known_once_and_every_wording_names_it() -> None:
    for topic in TOPICS:
        things = [thing for thing, _ in topic.facts]
        assert len(set(things)) == len(things)
        assert all(wording.count("{}") == 1 for wording in topic.wordings.train + topic.wordings.heldout)
        assert topic.answer.count("{}") == 2


def test_days_follow_each_other() -> None:
    days = dict(next(topic for topic in TOPICS if topic.subject == "the day after {}").facts)
    day = "Monday"
    for _ in range(7):
        day = days[day]
    assert day == "Monday" and len(days) == 7


def test_a_conversation_alternates() -> None:
    for number in range(30):
        taught = lesson("chat", 0, number, "train")
        assert [message["role"] for message in taught.messages] == ["user", "assistant"] * (
            len(taught.messages) // 2
        )
        assert taught.thinking == ("reasoning_content" in taught.messages[-1])
        assert len(taught.messages) == 2 or not taught.thinking
