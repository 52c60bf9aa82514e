"""Charts as SVG: stacked bars in panels beside each other, and lines. Colours are classes, which a page's style sheet
sets: `s0` to `s6` fill bars, `l0` to `l6` stroke lines, and `axis`, `grid`, `text` and `range` are the rest.

Pure functions: the same chart gives the same text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH = 760
"""The width of a chart in its own units, which are pixels at its natural size."""
_HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 230, 52, 12, 22, 40
_GAP = 24  # between panels
_LEGEND_LINE, _CHARACTER = 20, 6.6  # the height of a line of the legend, and about the width of a character
_BARS_WITH_LABELS = 14  # in a chart: more labels overlap
_WIDEST = 64.0  # of a bar


@dataclass(frozen=True, slots=True)
class StackedBar:
    """A bar of one part for each series of its chart. `low` and `high` bound the whole, if they are known."""

    label: str
    parts: tuple[float, ...]
    low: float | None = None
    high: float | None = None

    @property
    def whole(self) -> float:
        return sum(self.parts)


@dataclass(frozen=True, slots=True)
class BarPanel:
    """Bars beside each other, under a title."""

    title: str
    bars: tuple[StackedBar, ...]


@dataclass(frozen=True, slots=True)
class BarChart:
    """Panels that share their axis. `series` names the parts of each bar, from the bottom up."""

    title: str
    unit: str
    series: tuple[str, ...]
    panels: tuple[BarPanel, ...]


@dataclass(frozen=True, slots=True)
class ChartLine:
    """Points from the left to the right. A line that is `stepped` keeps each value until the next point."""

    name: str
    points: tuple[tuple[float, float], ...]
    stepped: bool = False


@dataclass(frozen=True, slots=True)
class LineChart:
    """Lines over a common axis from 0, or from the least x if it is `logarithmic`."""

    title: str
    x: str
    unit: str
    lines: tuple[ChartLine, ...]
    logarithmic: bool = False
    levels: tuple[tuple[float, str], ...] = field(default=())  # values to compare with, and what they are


Chart = BarChart | LineChart


def drawn(chart: Chart) -> str:
    """The chart as an SVG element."""
    return _bars(chart) if isinstance(chart, BarChart) else _lines(chart)


def ticks(most: float, about: int = 5) -> list[float]:
    """Round values from 0 up to at least `most`: steps of 1, 2 or 5 by a power of ten."""
    if most <= 0:
        return [0.0, 1.0]
    raw = most / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    return [number * step for number in range(math.ceil(most / step * 0.999) + 1)]


def number(value: float) -> str:
    """A value as axes and tables show it: three digits, and no exponent."""
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


class _Canvas:
    """The parts of one chart, with a scale from 0 to the last tick."""

    def __init__(self, title: str, unit: str, most: float, legend: Sequence[tuple[str, str]]) -> None:
        self._title, self._unit, self._ticks = title, unit, ticks(most)
        self._rows = list(_legend_rows(legend))
        self._under = _HEIGHT + _LEGEND_LINE * len(self._rows)
        self._made: list[str] = []

    def add(self, text: str) -> None:
        self._made.append(text)

    def y(self, value: float) -> float:
        return _HEIGHT - _BOTTOM - value / self._ticks[-1] * (_HEIGHT - _BOTTOM - _TOP)

    def text(self, x: float, y: float, said: str, anchor: str = "middle") -> None:
        self.add(f'<text class="text" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(said)}</text>')

    def axis(self, left: float, right: float, *, labelled: bool) -> None:
        for value in self._ticks:
            at = self.y(value)
            kind = "grid" if value else "axis"
            self.add(f'<line class="{kind}" x1="{left:.1f}" x2="{right:.1f}" y1="{at:.1f}" y2="{at:.1f}"/>')
            if labelled:
                self.text(left - 6, at + 4, number(value), "end")
        if labelled:
            self.text(4, 13, self._unit, "start")

    def finished(self) -> str:
        for row, entries in enumerate(self._rows):
            x = float(_LEFT)
            y = _HEIGHT + _LEGEND_LINE * row + 8
            for name, kind in entries:
                self.add(f'<rect class="{kind}" x="{x:.1f}" y="{y - 9:.1f}" width="10" height="10" rx="2"/>')
                self.text(x + 15, y, name, "start")
                x += _entry_width(name)
        return (
            f'<svg viewBox="0 0 {WIDTH} {self._under}" role="img" aria-label="{escape(self._title)}">'
            f"{''.join(self._made)}</svg>"
        )


def _entry_width(name: str) -> float:
    return 32 + _CHARACTER * len(name)


def _legend_rows(legend: Sequence[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    """The entries of the legend, as many in a row as fit."""
    row: list[tuple[str, str]] = []
    for entry in legend:
        if row and sum(_entry_width(name) for name, _ in (*row, entry)) > WIDTH - _LEFT:
            yield row
            row = []
        row.append(entry)
    if row:
        yield row


def _bars(chart: BarChart) -> str:
    bars = [bar for panel in chart.panels for bar in panel.bars]
    most = max((max(bar.whole, bar.high or 0.0) for bar in bars), default=0.0)
    canvas = _Canvas(chart.title, chart.unit, most, [(name, f"s{at}") for at, name in enumerate(chart.series)])
    room = WIDTH - _LEFT - _RIGHT - _GAP * (len(chart.panels) - 1)
    left = float(_LEFT)
    for at, panel in enumerate(chart.panels):
        wide = room * (len(panel.bars) / len(bars) if bars else 1.0)
        canvas.axis(left, left + wide, labelled=at == 0)
        canvas.text(left + wide / 2, 13, panel.title)
        each = wide / max(1, len(panel.bars))
        for place, bar in enumerate(panel.bars):
            _bar(canvas, chart.series, bar, left + each * (place + 0.5), min(_WIDEST, each * 0.72))
            if len(bars) <= _BARS_WITH_LABELS or place % max(1, len(panel.bars) // 5) == 0:
                canvas.text(left + each * (place + 0.5), _HEIGHT - _BOTTOM + 16, bar.label)
        left += wide + _GAP
    return canvas.finished()


def _bar(canvas: _Canvas, series: Sequence[str], bar: StackedBar, middle: float, wide: float) -> None:
    under = 0.0
    for at, (name, part) in enumerate(zip(series, bar.parts, strict=True)):
        if part > 0:
            top, high = canvas.y(under + part), canvas.y(under) - canvas.y(under + part)
            canvas.add(
                f'<rect class="s{at}" x="{middle - wide / 2:.1f}" y="{top:.1f}" width="{wide:.1f}" height="{high:.2f}">'
                f"<title>{escape(bar.label)}, {escape(name)}: {number(part)}</title></rect>"
            )
        under += part
    if bar.low is not None and bar.high is not None:
        low, high = canvas.y(max(0.0, bar.low)), canvas.y(bar.high)  # the axis begins at 0, as what is measured
        caps = "".join(f"M{middle - 4:.1f} {at:.1f}h8" for at in (low, high))
        canvas.add(f'<path class="range" d="M{middle:.1f} {low:.1f}V{high:.1f}{caps}"/>')


def _lines(chart: LineChart) -> str:
    points = [point for line in chart.lines for point in line.points]
    most = max([y for _, y in points] + [value for value, _ in chart.levels], default=0.0)
    canvas = _Canvas(chart.title, chart.unit, most, [(line.name, f"s{at}") for at, line in enumerate(chart.lines)])
    right = WIDTH - _RIGHT
    canvas.axis(_LEFT, right, labelled=True)
    marks = _marks([x for x, _ in points], logarithmic=chart.logarithmic)

    def at_x(value: float) -> float:
        shown, first, last = ((math.log(one) if chart.logarithmic else one) for one in (value, marks[0], marks[-1]))
        return _LEFT + (shown - first) / ((last - first) or 1.0) * (right - _LEFT)

    for value in marks:
        said = number(value)
        canvas.text(min(at_x(value), WIDTH - _CHARACTER * len(said) / 2), _HEIGHT - _BOTTOM + 16, said)
    canvas.text((_LEFT + right) / 2, _HEIGHT - _BOTTOM + 32, chart.x)
    for value, said in chart.levels:
        at = canvas.y(value)
        canvas.add(f'<line class="level" x1="{_LEFT}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>')
        canvas.text(right - 4, at - 4, said, "end")
    for at_line, line in enumerate(chart.lines):
        placed = [(at_x(x), canvas.y(y)) for x, y in line.points]
        path = "".join(_segment(line, place, x, y) for place, (x, y) in enumerate(placed))
        if path:
            canvas.add(f'<path class="l{at_line}" d="{path}"><title>{escape(line.name)}</title></path>')
        if not line.stepped:
            for x, y in placed:
                canvas.add(f'<circle class="s{at_line}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>')
    return canvas.finished()


def _marks(xs: Sequence[float], *, logarithmic: bool) -> list[float]:
    """Where the axis has labels, from its begin to its end."""
    return sorted(set(xs)) or [1.0] if logarithmic else ticks(max(xs, default=0.0), 8)


def _segment(line: ChartLine, place: int, x: float, y: float) -> str:
    if place == 0:
        return f"M{x:.1f} {y:.1f}"
    return f"H{x:.1f}V{y:.1f}" if line.stepped else f"L{x:.1f} {y:.1f}"
