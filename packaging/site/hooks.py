"""What the site of the documentation has beyond mkdocs: decisions in the navigation, pages as plain text, the index of
the search as a script, state diagrams as tables, and the old anchors of operations.md.

The pages are written for GitHub, too. So anchors are made as there, and lists are indented as Python-Markdown wants
them.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

OLD = "operations.md"
MOVED = {
    "capacity.md": "a-job-that-runs-out-of-memory disk disk-1=what-a-job-may-write memory placement",
    "hosts.md": (
        "another-controller features-of-hosts hosts-between-which-vms-move hosts-in-different-networks "
        "hosts-that-die numa-nodes several-hosts which-vms-reach-each-other"
    ),
    "images.md": (
        "images=make-an-image images-of-others is-an-image-right kinds-pace-and-warm-pools=kinds-of-clones "
        "mpi software-that-jobs-import-over-the-network"
    ),
    "install.md": "on-a-site= with-pip-and-by-hand",
    "job-vms.md": (
        "mpi-in-the-vms-of-a-job virtual-functions-of-network-cards vms-inside-jobs= vms-of-a-platform without-a-plugin"
    ),
    "leases.md": "jobs-of-full-partitions leased-hosts",
    "monitoring.md": (
        "prometheus=of-hosts-and-vms prometheus-and-grafana=metrics-for-prometheus-and-grafana utilization "
        "web-page what-a-job-used"
    ),
    "moves.md": "jobs-that-give-way vms-that-move",
    "operate.md": "the-commands what-is-wrong-and-what-is-missing=doctor-and-status when-something-is-wrong=by-symptom",
    "saved.md": "at-the-time-limit checkpoints saved-jobs= suspended-jobs their-states",
    "services.md": "old-records upgrading",
    "slurm.md": (
        "maintenance-of-the-cluster restarts-of-slurmctld the-gate what-of-slurm-does-not-reach-jobs-in-vms "
        "what-of-slurmconf-holds-in-vms"
    ),
    "try.md": "on-one-machine-the-lab=the-lab",
    "users.md": "what-jobs-request-by-their-comment=what-slurm-has-no-option-for",
    "waiting.md": (
        "jobs-that-start-ahead-of-others limits the-line-in-admincomment users-ask-about-their-own-jobs "
        "what-would-start-now why-a-job-waits=ask-explain"
    ),
}
"""By page, the anchors that operations.md had when it was one page; after "=" that of the section now, if it is
another one."""


def slug(title: str, separator: str = "-") -> str:
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", separator)


def moved() -> Iterator[tuple[str, str]]:
    """Each old anchor of operations.md, with the page and anchor that it leads to."""
    for page, names in MOVED.items():
        for name in names.split():
            old, other, new = name.partition("=")
            yield old, page + ("#" if not other or new else "") + (new if other else old)


def decisions(config: MkDocsConfig) -> list[str]:
    """Their pages, the index first."""
    names = {path.name for path in (Path(config.docs_dir) / "decisions").glob("*.md")}
    return [f"decisions/{name}" for name in sorted(names, key=lambda name: (name != "index.md", name))]


# --- events of mkdocs --------------------------------------------------------------------------------


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.mdx_configs["toc"]["slugify"] = slug
    config.nav = [*(config.nav or []), {"Decisions": decisions(config)}]
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    if OLD not in files.src_uris:
        files.append(File.generated(config, OLD, content="# Operations\n", inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    if page.file.src_uri == OLD:
        links = "\n".join(f'- <a id="{old}" class="moved"></a>[{old}]({new})' for old, new in moved())
        markdown += f"\n## Other sections\n\nThis page had all of this once. It is on other pages now:\n\n{links}\n"
    text = re.sub(r"```mermaid\n(stateDiagram.*?)```\n", lambda found: transitions(found[1]), markdown, flags=re.DOTALL)
    text = text.replace("](decisions/)", f"]({decisions(config)[0]})")
    return indented(text)


def on_post_page(output: str, *, page: Page, config: MkDocsConfig) -> str:
    """Write the page as plain text beside its HTML."""
    text = re.sub(r"\]\(([\w./-]+)\.md(?:#[\w-]*)?\)", r"](\1.txt)", page.file.content_string)
    place = Path(config.site_dir, page.file.dest_uri).with_suffix(".txt")
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text)
    return output


def on_post_build(*, config: MkDocsConfig) -> None:
    """The index as a script: a page that was opened from a file system may load no JSON."""
    index = Path(config.site_dir, "search", "search_index.json")
    documents = json.loads(index.read_text())["docs"]
    Path(config.site_dir, "documents.js").write_text(f"window.documents = {json.dumps(documents)};\n")
    shutil.rmtree(index.parent)


# --- Markdown ----------------------------------------------------------------------------------------


def transitions(diagram: str) -> str:
    """A state diagram of Mermaid as a table: browsers draw it only with a program of megabytes."""
    rows: dict[str, list[str]] = {}
    for source, target, event in re.findall(r"^ *(\S+) --> (\S+?)(?:: (.*))?$", diagram, re.MULTILINE):
        if target != "[*]":
            rows.setdefault("(new)" if source == "[*]" else source, []).append(f"{event} → **{target}**")
    lines = ["| from | event → to |", "| --- | --- |"]
    return "\n".join([*lines, *(f"| {source} | {'; '.join(ways)} |" for source, ways in rows.items()), ""])


def indented(markdown: str) -> str:
    """The same page with what belongs to an item of a list indented by four spaces, as Python-Markdown wants it, in
    place of the width of the item's mark, and with a blank line before a list, and after an item of several blocks."""
    lines: list[str] = []
    widths: list[int] = []  # of the lists that are open: the column at which their items' text begins
    fence, blank, blocks = "", True, True  # blocks: the open item has several, or there is none
    for line in markdown.splitlines():
        text = line.lstrip(" ")
        indent = len(line) - len(text)
        number = r"\d+" if blank or widths else "1"  # no other one interrupts a paragraph
        item = None if fence else re.match(rf"([-*+]|{number}[.)]) +(?=\S)", text)
        if not fence and text and (item or blank or not widths):
            while widths and indent < widths[-1]:
                widths.pop()
        inside = widths[-1] if widths else 0
        if item and indent - inside < 4:  # else it is in a block of code
            if blocks and not blank:
                lines.append("")
            lines.append("    " * len(widths) + text)
            widths.append(indent + len(item[0]))
            blocks = False
        else:
            kept = line[min(indent, inside) :] if fence or indent >= inside else text
            lines.append("    " * len(widths) + kept if text else "")
        if mark := re.match(r"(```+|~~~+)", text):
            fence = "" if fence and text.startswith(fence) else fence or mark[0]
        blank = not text
        blocks = blocks or blank
        if text.startswith("|"):
            lines[-1] = re.sub(r"`[^`]*`", lambda code: code[0].replace("\\|", "|"), lines[-1])
    return "\n".join(lines) + "\n"
