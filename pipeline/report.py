"""Stage 7, report: all results and facts of the run on one page, report.html, and the same in Markdown, report.md."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if __package__ in (None, ""):  # run as a script: find the packages, and let no file of this folder shadow a library
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from drover.pipeline.core.files import output_record, write_text

if TYPE_CHECKING:
    from drover.pipeline.contract.stage_work import Work


def report(work: Work) -> None:
    """Read the run, write both pages, and copy them to the run folder itself."""
    from drover.pipeline.reporting.facts import collect
    from drover.pipeline.reporting.render import compose, html, markdown

    document = compose(collect(work.run))
    pages = {"report.html": html(document), "report.md": markdown(document)}
    for name, text in pages.items():
        write_text(work.folder / name, text)
    for name, text in pages.items():
        write_text(work.run.folder / name, text)
    work.say(document.verdict)
    work.commit([output_record(work.folder, work.folder / name) for name in pages],
                {"notices": len(document.notices)})
    work.say(f"open {(work.run.folder / 'report.html').absolute()}")


if __name__ == "__main__":
    from drover.pipeline.contract.entry import stage_main

    sys.exit(stage_main("report", report))
