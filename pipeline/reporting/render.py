"""The document as one HTML page and as Markdown."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from drover.pipeline.evaluation.results import fenced
from drover.pipeline.reporting.corpus import data_section
from drover.pipeline.reporting.course import training_section
from drover.pipeline.reporting.document import Document
from drover.pipeline.reporting.facts import Facts
from drover.pipeline.reporting.headline import notices, tiles, verdict
from drover.pipeline.reporting.measured import heldout_section, tasks_section, texts_section
from drover.pipeline.reporting.provenance import export_section, provenance_section, time_section, tokenizer_section
from drover.pipeline.reporting.spent import checkpoints_section, goodput_section

TEMPLATES = Path(__file__).resolve().parent / "templates"
CHAPTERS = (heldout_section, training_section, tasks_section, checkpoints_section, texts_section, data_section,
            tokenizer_section, export_section, goodput_section, time_section, provenance_section)


def compose(facts: Facts) -> Document:
    """What the report says."""
    config = facts.config
    finished = facts.manifests["evaluate"].finished.replace("T", " ").replace("+00:00", " UTC")
    return Document(title=config.report.title or config.name,
                    subtitle=f"Drover run {config.name}, evaluated {finished}",
                    verdict=verdict(facts), notices=notices(facts), tiles=tiles(facts),
                    sections=[section for make in CHAPTERS if (section := make(facts))])


def html(document: Document) -> str:
    """One page that needs nothing else: no script, no network. Everything but our own charts is escaped."""
    return _environment(autoescape=True).get_template("report.html.j2").render(report=document)


def markdown(document: Document) -> str:
    """The same without charts."""
    return _environment(autoescape=False).get_template("report.md.j2").render(report=document)


def _environment(autoescape: bool) -> Environment:
    environment = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=autoescape, undefined=StrictUndefined,
                              trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    environment.filters.update(cell=_cell, fenced=fenced, plain=_plain)
    return environment


def _cell(text: str) -> str:
    """Text for a cell of a Markdown table."""
    return _plain(text).replace("|", "\\|")


def _plain(text: str) -> str:
    """Text in which Markdown finds no HTML and no line break."""
    return " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;")
