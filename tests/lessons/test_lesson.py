"""A lesson as a request."""

from vllm_deepinfer.lessons.lesson import Lesson, assistant, user

ASKED = (user("Hi"), assistant("Hello!", "A greeting."), user("Bye"), assistant("Goodbye!", "The end."))
TOOL = {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}}


def test_every_answer_is_learnt_without_reasoning() -> None:
    assert Lesson("chat", ASKED).answers == (1, 3)


def test_with_reasoning_the_last_alone_unless_there_are_tools() -> None:
    assert Lesson("chat", ASKED, thinking=True).answers == (3,)
    assert Lesson("tools", ASKED, tools=(TOOL,), thinking=True).answers == (1, 3)


def test_the_request_of_a_turn() -> None:
    body = Lesson("tools", ASKED, tools=(TOOL,), thinking=True, effort="low", json_output=True).body(1)
    assert body == {
        "model": "lessons",
        "messages": [user("Hi")],
        "thinking": {"type": "enabled"},
        "tools": [{"type": "function", "function": TOOL}],
        "reasoning_effort": "low",
        "response_format": {"type": "json_object"},
    }


def test_effort_is_left_out_without_reasoning() -> None:
    body = Lesson("chat", ASKED, effort="low").body()
    assert "reasoning_effort" not in body
    assert body["thinking"] == {"type": "disabled"}
    assert len(body["messages"]) == 4
