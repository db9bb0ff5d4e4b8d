"""The report: facts to a document, and the document as one HTML page or as Markdown."""

from __future__ import annotations

from drover.pipeline.reporting.chapters.data import data, tokenizer
from drover.pipeline.reporting.chapters.provenance import provenance
from drover.pipeline.reporting.chapters.results import export, samples, tasks, validation
from drover.pipeline.reporting.chapters.summary import notices, result, tiles
from drover.pipeline.reporting.chapters.training import goodput, training
from drover.pipeline.reporting.document import Chapter, ReportDocument
from drover.pipeline.reporting.facts import Facts
from drover.pipeline.reporting.plots import TEMPLATES, draw

CHAPTERS = {"Validation": validation, "Training": training, "Tasks": tasks, "Samples": samples, "Data": data,
            "Tokenizer": tokenizer, "Exported model": export, "Goodput": goodput, "Provenance": provenance}


def compose(facts: Facts) -> ReportDocument:
    """The report's content."""
    name, finished = facts.config.name, facts.manifests["evaluate"].finished
    chapters = [Chapter(title, [block for block in blocks(facts) if block]) for title, blocks in CHAPTERS.items()]
    return ReportDocument(
        facts.config.report.title or name, f"Drover run {name}, evaluated {finished[:19].replace('T', ' ')} UTC",
        result(facts), list(notices(facts)), list(tiles(facts)), [chapter for chapter in chapters if chapter.blocks])


def html(document: ReportDocument) -> str:
    """A self-contained page without scripts and network access. Everything except our own charts is escaped."""
    return _rendered("report.html.j2", document, autoescape=True)


def markdown(document: ReportDocument) -> str:
    """The same as Markdown, without the charts: a table next to each has its values."""
    return _rendered("report.md.j2", document, autoescape=False)


def _rendered(template: str, document: ReportDocument, autoescape: bool) -> str:
    environment = TEMPLATES.overlay(autoescape=autoescape)
    environment.filters.update(cell=lambda text: _plain(text).replace("|", "\\|"), draw=draw, fenced=_fenced,
                               kind=lambda block: type(block).__name__, plain=_plain)
    return environment.get_template(template).render(report=document)


def _plain(text: str) -> str:
    """Text without HTML and line breaks in Markdown."""
    return " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;")


def _fenced(text: str) -> str:
    """`text` as a Markdown code block that its content cannot end."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}text\n{text}\n{fence}"
