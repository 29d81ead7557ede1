"""What is copied is what was said; stories add what they tell."""

import re

from vllm_deepinfer.lessons.generator import lesson


def test_the_copy_ends_the_question() -> None:
    sizes = []
    for number in range(60):
        messages = lesson("copy", 0, number, "train").messages
        for asked, answered in zip(messages[::2], messages[1::2], strict=True):
            text = answered["content"]
            assert asked["content"].endswith((f": {text}", f":\n{text}", f' "{text}"')), asked
            sizes.append(len(text.split()))
    assert min(sizes) == 3 and 50 < max(sizes) <= 60
    assert 0.5 < sum(size <= 12 for size in sizes) / len(sizes) < 0.85


def test_a_story_s_answer_is_the_sum_of_its_numbers() -> None:
    for number in range(60):
        asked, answered = lesson("reasoning", 0, number, "heldout").messages
        a, b = map(int, re.findall(r"\d+", asked["content"]))
        assert answered["content"] == f"The answer is {a + b}."
        assert answered["reasoning_content"].endswith(f"{a} + {b} = {a + b}.")
