"""Charts: what is drawn is in proportion to the values, and can be read."""

from __future__ import annotations

import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from multiverse_lab.bench.svg import (
    WIDTH,
    BarChart,
    BarPanel,
    Chart,
    ChartLine,
    LineChart,
    StackedBar,
    drawn,
    number,
    ticks,
)

BARS = BarChart("t", "s", ("one", "two"), (
    BarPanel("full", (StackedBar("1", (10.0, 30.0), 35.0, 50.0), StackedBar("2", (0.0, 20.0)))),
    BarPanel("instant", (StackedBar("1", (5.0, 0.0)),)),
))  # fmt: skip
LINES = LineChart(
    "t",
    "x",
    "%",
    (ChartLine("a", ((0.0, 0.0), (10.0, 50.0)), stepped=True), ChartLine("b", ((10.0, 100.0),))),
    levels=((40.0, "published"),),
)


def _elements(chart: Chart, tag: str) -> list[dict[str, str]]:
    return [one.attrib for one in ElementTree.fromstring(drawn(chart)).iter(tag)]


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (0.0, [0, 1]),
        (7.0, [0, 2, 4, 6, 8]),
        (100.0, [0, 20, 40, 60, 80, 100]),
        (0.045, [0, 0.01, 0.02, 0.03, 0.04, 0.05]),
    ],
)
def test_ticks_are_round_and_reach_the_most(most: float, expected: list[float]) -> None:
    assert ticks(most) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (1234.5, "1,234"), (12.34, "12.3"), (0.01234, "0.0123"), (3.0, "3"), (-2.5, "-2.5")]
)
def test_numbers_have_three_digits(value: float, text: str) -> None:
    assert number(value) == text


def test_bars_are_as_high_as_their_parts_and_stand_on_each_other() -> None:
    parts = [one for one in _elements(BARS, "rect") if one.get("height") != "10"]
    assert [one["class"] for one in parts] == ["s0", "s1", "s1", "s0"], "a part of nothing is not drawn"
    heights = [float(one["height"]) for one in parts]
    assert heights[1] == pytest.approx(3 * heights[0], abs=0.1) and heights[2] == pytest.approx(2 * heights[0], abs=0.1)
    assert float(parts[1]["y"]) + heights[1] == pytest.approx(float(parts[0]["y"]), abs=0.1)
    assert float(parts[3]["x"]) > float(parts[2]["x"]), "the panels are beside each other"


def test_only_a_known_interval_is_drawn() -> None:
    (path,) = _elements(BARS, "path")
    low, high = map(float, re.findall(r"M[\d.]+ ([\d.]+)V([\d.]+)", path["d"])[0])
    unit = (
        next(float(one["height"]) for one in _elements(BARS, "rect") if one["class"] == "s0" and "rx" not in one) / 10
    )
    assert low - high == pytest.approx(15 * unit, abs=0.2)


def test_an_interval_that_reaches_below_zero_ends_at_the_axis() -> None:
    chart = BarChart("t", "s", ("one",), (BarPanel("", (StackedBar("1", (10.0,), -30.0, 50.0),)),))
    (path,), (bar,) = _elements(chart, "path"), [one for one in _elements(chart, "rect") if "rx" not in one]
    low = float(re.findall(r"M[\d.]+ ([\d.]+)V", path["d"])[0])
    assert low == pytest.approx(float(bar["y"]) + float(bar["height"]), abs=0.1)


def test_a_stepped_line_keeps_its_value_until_the_next_point() -> None:
    first, second = (one["d"] for one in _elements(LINES, "path"))
    assert re.fullmatch(r"M[\d.]+ [\d.]+H[\d.]+V[\d.]+", first) and re.fullmatch(r"M[\d.]+ [\d.]+", second)
    assert len(_elements(LINES, "circle")) == 1, "the points of the other line"


def test_the_last_mark_of_a_long_axis_is_inside() -> None:
    long = replace(LINES, lines=(ChartLine("a", ((0.0, 1.0), (1_000_000.0, 1.0))),))
    (last,) = [one for one in ElementTree.fromstring(drawn(long)).iter("text") if one.text == "1,000,000"]
    assert float(last.attrib["x"]) + 3 * len("1,000,000") < WIDTH and last.attrib["text-anchor"] == "middle"


def test_levels_have_their_place_on_the_axis() -> None:
    (level,) = [one for one in _elements(LINES, "line") if one["class"] == "level"]
    grid = [float(one["y1"]) for one in _elements(LINES, "line") if one["class"] != "level"]
    assert float(level["y1"]) == pytest.approx(grid[2]), "0, 20, 40"


def test_on_a_logarithmic_axis_equal_ratios_are_equal_ways() -> None:
    chart = LineChart("t", "x", "s", (ChartLine("a", ((1.0, 1.0), (10.0, 1.0), (100.0, 1.0))),), logarithmic=True)
    one, two, three = (float(each["cx"]) for each in _elements(chart, "circle"))
    assert two - one == pytest.approx(three - two, abs=0.2)


def test_the_legend_has_as_many_lines_as_it_needs_and_names_every_series() -> None:
    names = tuple(f"a rather long name of series {at}" for at in range(7))
    chart = BarChart("t", "s", names, (BarPanel("", (StackedBar("x", (1.0,) * 7),)),))
    keys = [one for one in _elements(chart, "rect") if "rx" in one]
    assert len(keys) == 7 and len({one["y"] for one in keys}) > 1
    assert all(name in drawn(chart) for name in names)
    assert all(float(one["x"]) < 760 for one in keys)


def test_what_is_written_is_escaped() -> None:
    text = drawn(BarChart("<t> & more", "s", ("a<b",), (BarPanel("x>y", (StackedBar("&", (1.0,)),)),)))
    assert ElementTree.fromstring(text).attrib["aria-label"] == "<t> & more" and "a&lt;b" in text
