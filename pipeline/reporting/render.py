"""The report: facts to a document, and the document as one HTML page or as Markdown."""

from __future__ import annotations

from drover.pipeline.config.tree import Config
from drover.pipeline.core.files import Record
from drover.pipeline.reporting.chapters.checkpoints import checkpoints
from drover.pipeline.reporting.chapters.data import data
from drover.pipeline.reporting.chapters.export import export
from drover.pipeline.reporting.chapters.goodput import goodput
from drover.pipeline.reporting.chapters.provenance import provenance
from drover.pipeline.reporting.chapters.samples import samples
from drover.pipeline.reporting.chapters.stages import stages
from drover.pipeline.reporting.chapters.summary import notices, tiles, verdict
from drover.pipeline.reporting.chapters.tasks import tasks
from drover.pipeline.reporting.chapters.tokenizer import tokenizer
from drover.pipeline.reporting.chapters.training import training
from drover.pipeline.reporting.chapters.validation import validation
from drover.pipeline.reporting.document import Chapter, Document
from drover.pipeline.reporting.facts import Facts
from drover.pipeline.reporting.plots import TEMPLATES, draw

CHAPTERS = {"Validation": validation, "Training": training, "Tasks": tasks, "Checkpoints": checkpoints,
            "Samples": samples, "Data": data, "Tokenizer": tokenizer, "Exported model": export, "Goodput": goodput,
            "Stages and machines": stages, "Provenance": provenance}


def compose(facts: Facts) -> Document:
    """The report's content."""
    name, finished = facts.config.name, facts.manifests["evaluate"].finished
    return Document(facts.config.report.title or name, f"Drover run {name}, evaluated {finished[:19].replace('T', ' ')}"
                    " UTC", verdict(facts), list(notices(facts)), list(tiles(facts)), _chapters(facts, *CHAPTERS))


def of_results(config: Config, results: Record, verdict: str) -> Document:
    """The content of evaluate's results.md: the report's chapters that need its results only."""
    return Document(f"Evaluation of {config.name}", "Parameters: {:,}, vocabulary: {:,}, measured in {}".format(
        *(results["model"][key] for key in ("parameters", "vocab_size", "dtype"))), verdict, [], [],
        _chapters(Facts(config, {}, results), "Validation", "Tasks", "Samples"))


def _chapters(facts: Facts, *titles: str) -> list[Chapter]:
    chapters = (Chapter(title, [block for block in CHAPTERS[title](facts) if block]) for title in titles)
    return [chapter for chapter in chapters if chapter.blocks]


def html(document: Document) -> str:
    """A self-contained page without scripts and network access. Everything except our own charts is escaped."""
    return _rendered("report.html.j2", document, autoescape=True)


def markdown(document: Document) -> str:
    """The same as Markdown. Charts are text, unless a table has their values."""
    return _rendered("report.md.j2", document, autoescape=False)


def _rendered(template: str, document: Document, autoescape: bool) -> str:
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
