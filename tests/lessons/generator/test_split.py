"""No template and no value that is held out occurs in training, for any kind of lesson."""

import re

import pytest

from vllm_deepinfer.lessons.generator import KINDS, lesson
from vllm_deepinfer.lessons.lesson import Kind
from vllm_deepinfer.lessons.split import Split

MANY = 250


def made_of(kind: Kind, split: Split) -> tuple[set[str], set[str]]:
    lessons = [lesson(kind, "split", number, split) for number in range(MANY)]
    return (
        {template for one in lessons for template in one.templates},
        {value for one in lessons for value in one.values},
    )


@pytest.mark.parametrize("kind", KINDS)
def test_templates_and_values_are_apart(kind: Kind) -> None:
    train_templates, train_values = made_of(kind, "train")
    templates, values = made_of(kind, "heldout")
    assert templates and train_templates
    assert not templates & train_templates
    assert not values & train_values
    if kind != "chat":  # its facts are learnt by heart
        assert values and train_values


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "chat"])
def test_a_held_out_value_is_in_no_training_text(kind: Kind) -> None:
    """Not even by way of another field: the texts themselves are searched for long values."""
    values = {value.split(":", 1)[1] for value in made_of(kind, "heldout")[1]}
    long = {value for value in values if len(value) > 6}
    texts = "\n".join(
        str(message["content"]) + str(message.get("tool_calls"))
        for number in range(MANY)
        for message in lesson(kind, "split", number, "train").messages
    )
    suspects = {value for value in long if value in texts}  # "text: 43" is also in "context: 43"
    assert not {value for value in suspects if re.search(rf"\b{re.escape(value)}\b", texts)}


@pytest.mark.parametrize("kind", KINDS)
def test_a_lesson_follows_from_its_number(kind: Kind) -> None:
    assert lesson(kind, 0, 7, "train") == lesson(kind, 0, 7, "train")
    assert len({str(lesson(kind, 0, number, "train").messages) for number in range(20)}) > 15
