"""The report as one HTML page, which needs nothing else: figures as SVG, their data as CSV, our values beside the
published ones."""

from __future__ import annotations

import base64
import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from multiverse_lab.bench.clusters import MeanOver
from multiverse_lab.bench.paper.figures import Cell, ComparedValue, DataTable, PaperFigure
from multiverse_lab.bench.svg import Chart, drawn, number

_STYLE = Path(__file__).with_name("page.css")


@dataclass(frozen=True, slots=True)
class ReportSection:
    """A part of the report beside the paper's figures: `command` makes it. `data` are its figures as a table, which is
    shown if there is no other `table`; `notes` come after it."""

    key: str
    title: str
    about: str
    command: str
    charts: tuple[Chart, ...]
    data: DataTable
    notes: tuple[str, ...] = ()
    table: DataTable | None = None


@dataclass(frozen=True, slots=True)
class PaperReport:
    """`facts` say how, where and when the runs were made, and `warnings` what the figures do not say."""

    title: str
    lead: str
    facts: Mapping[str, str]
    warnings: tuple[str, ...]
    figures: Sequence[PaperFigure]
    sections: Sequence[ReportSection]


def page(report: PaperReport) -> str:
    """The whole document."""
    facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(said)}</dd>" for name, said in report.facts.items())
    warnings = "".join(f"<p>{escape(one)}</p>" for one in report.warnings)
    parts = [
        f"<header><h1>{escape(report.title)}</h1><p>{escape(report.lead)}</p></header>",
        f'<section id="runs"><h2>The runs</h2><dl>{facts}</dl></section>',
        f'<section id="meaning"><h2>What the figures say</h2>{warnings}</section>',
        _index(report),
        *map(_figure, report.figures),
        *map(_section, report.sections),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(report.title)}</title><style>\n{_STYLE.read_text()}</style></head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def as_csv(data: DataTable) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(data[0])
    writer.writerows(data[1])
    return text.getvalue()


def csv_files(report: PaperReport) -> dict[str, str]:
    """The data of every figure, by the name of its file."""
    named = {f"figure-{one.number:02}-{one.key}.csv": one.data for one in report.figures}
    named |= {f"{one.key}.csv": one.data for one in report.sections}
    return {name: as_csv(data) for name, data in named.items()}


def shown(value: MeanOver | None, unit: str) -> str:
    """A value with its interval, as far as it is known."""
    if value is None:
        return "not measured"
    text = f"{number(value.value)} {unit}".strip()
    if value.low is None or value.high is None:
        return text
    return f"{text} ({number(value.low)} to {number(value.high)})"


def _index(report: PaperReport) -> str:
    if not report.figures:
        return ""
    rows = []
    for one in report.figures:
        last = one.values[-1] if one.values else None
        rows.append((
            f'<a href="#{one.key}">{one.number}</a>', f'<a href="#{one.key}">{escape(one.title)}</a>',
            escape(last.name) if last else "", _unbroken(last.published) if last else "",
            _unbroken(shown(last.ours, last.unit)) if last else "",
        ))  # fmt: skip
    rows.extend(
        ("", f'<a href="#{section.key}">{escape(section.title)}</a>', "", "", "") for section in report.sections
    )
    heads = ("figure", "what", "for example", "published", "here")
    return f'<section id="index"><h2>Figures</h2>{_table(heads, rows, right=(3, 4))}</section>'


def _figure(one: PaperFigure) -> str:
    heads: tuple[str, ...] = ("", "published", "here (95 %)", "here, in the paper's time")
    rows: list[tuple[str, ...]] = [
        (escape(value.name), _unbroken(value.published), _unbroken(shown(value.ours, value.unit)), _in_paper(value))
        for value in one.values
    ]
    if not any(row[-1] for row in rows):
        heads, rows = heads[:-1], [row[:-1] for row in rows]
    return (
        f'<section id="{one.key}"><h2>{escape(one.title)} <small>figure {one.number}</small></h2>'
        f'<p class="about">{escape(one.about)}</p>{_drawings(one.charts)}'
        f"{_table(heads, rows, right=(1, 2, 3))}{f'<p>{escape(one.why)}</p>' if one.why else ''}"
        f"{_data(f'figure-{one.number:02}-{one.key}.csv', one.data)}</section>"
    )


def _unbroken(text: str) -> str:
    """A value, with a new line before its interval at most."""
    value, bracket, interval = text.partition(" (")
    return f"<span>{escape(value)}</span>" + (f" <span>({escape(interval)}</span>" if bracket else "")


def _in_paper(value: ComparedValue) -> str:
    return f"{number(value.in_paper)} s" if value.in_paper is not None else ""


def _section(one: ReportSection) -> str:
    heads, cells = one.data if one.table is None else one.table
    rows = [tuple(escape(_cell(cell)) for cell in row) for row in cells]
    right = tuple(at for at, cell in enumerate(cells[0] if cells else ()) if not isinstance(cell, str))
    notes = "".join(f"<p>{escape(note)}</p>" for note in one.notes)
    return (
        f'<section id="{one.key}"><h2>{escape(one.title)}</h2><p class="about">{escape(one.about)}</p>'
        f"<p>Made by <code>{escape(one.command)}</code></p>{_drawings(one.charts)}"
        f"{_table(heads, rows, right=right)}{notes}{_data(f'{one.key}.csv', one.data)}</section>"
    )


def _drawings(charts: Sequence[Chart]) -> str:
    return "".join(f"<figure>{drawn(chart)}<figcaption>{escape(chart.title)}</figcaption></figure>" for chart in charts)


def _cell(value: Cell) -> str:
    return value if isinstance(value, str) else number(value)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """A table of cells that are HTML already."""
    if not rows:
        return ""

    def line(tag: str, cells: Sequence[str]) -> str:
        made = (f"<{tag}{' class=n' if at in right else ''}>{cell}</{tag}>" for at, cell in enumerate(cells))
        return f"<tr>{''.join(made)}</tr>"

    body = "".join(line("td", row) for row in rows)
    return f'<div class="scroll"><table>{line("th", [escape(head) for head in heads])}{body}</table></div>'


def _data(name: str, data: DataTable) -> str:
    text = as_csv(data)
    encoded = base64.b64encode(text.encode()).decode()
    link = f'<a download="{name}" href="data:text/csv;base64,{encoded}">{name}</a>'
    return f"<details><summary>Data</summary><p>{link}</p><pre>{escape(text)}</pre></details>"
