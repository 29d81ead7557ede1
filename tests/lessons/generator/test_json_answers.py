"""Objects say what the question says."""

import json

from vllm_deepinfer.lessons.generator import lesson
from vllm_deepinfer.lessons.generator.json_answers import SAID, spoken


def test_every_field_of_the_answer_is_in_the_question() -> None:
    for number in range(60):
        messages = lesson("json", 0, number, "heldout").messages
        for asked, answered in zip(messages[::2], messages[1::2], strict=True):
            document = json.loads(answered["content"])
            assert 2 <= len(document) <= 4
            for name, value in document.items():
                ways = [way.format(name, spoken(value)) for way in SAID]
                assert any(way in asked["content"] for way in ways)
            assert "json" in asked["content"].lower()  # the recipe asks for the word


def test_truth_is_spoken_as_json() -> None:
    assert [spoken(value) for value in (True, False, 1, "x")] == ["true", "false", "1", "x"]
