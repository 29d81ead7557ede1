from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from vllm_deepinfer_plugins.train.chart import HEIGHT, WIDTH, running_mean, svg, ticks


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 10, [0, 2, 4, 6, 8, 10]),
        (2.3, 9.1, [2, 4, 6, 8, 10]),
        (10, 1000, [0, 200, 400, 600, 800, 1000]),
        (0.1, 0.12, [0.1, 0.105, 0.11, 0.115, 0.12]),
        (3, 3, [3, 3.2, 3.4, 3.6, 3.8, 4.0][:2]),
    ],
)
def test_ticks_are_round_and_enclose(low: float, high: float, expected: list[float]) -> None:
    found = ticks(low, high)
    assert found[0] <= low and found[-1] >= high and len(found) <= 9
    if low != high:
        assert found == pytest.approx(expected)


def test_running_mean_of_a_fiftieth() -> None:
    points = [(float(x), float(x % 2)) for x in range(100)]
    means = running_mean(points)
    assert means[0] == (0.0, 0.0) and all(value == 0.5 for _, value in means[1:])
    assert running_mean([(1.0, 5.0)]) == [(1.0, 5.0)]


def test_the_chart_is_xml_with_all_points_inside() -> None:
    text = svg("a < b", [(step, 9 - step / 20) for step in range(10, 101, 10)], x="step", y="bits")
    root = ElementTree.fromstring(text)
    lines = [node for node in root.iter() if node.tag.endswith("polyline")]
    assert [len(line.attrib["points"].split()) for line in lines] == [10, 10]
    for line in lines:
        places = [tuple(map(float, pair.split(","))) for pair in line.attrib["points"].split()]
        assert all(0 < x < WIDTH and 0 < y < HEIGHT for x, y in places)
        assert places == sorted(places), "a falling loss goes right and down"
    assert "a &lt; b" in text and re.search(r">100<", text)
