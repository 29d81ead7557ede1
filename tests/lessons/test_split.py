"""The split: deterministic, and of the stated size."""

from vllm_deepinfer.lessons.split import side_of


def test_sides_do_not_change_between_machines() -> None:
    assert [side_of(f"city:{name}") for name in ("North Hill", "Old Port", "High Gate")] == [
        "train",
        "train",
        "train",
    ]
    assert side_of("module:csv", 6) == "heldout"
    assert side_of("module:json.decoder", 6) == "train"


def test_about_the_stated_share_is_held_out() -> None:
    for percent in (0, 6, 10, 100):
        found = sum(side_of(str(number), percent) == "heldout" for number in range(10_000))
        assert abs(found / 100 - percent) <= 1
