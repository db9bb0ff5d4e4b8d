"""Stage 7, report: all results and facts of the run on one page, report.html, and the same in Markdown, report.md."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if __package__ in (None, ""):  # run as a script: find the packages, and let no file of this folder shadow a library
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import output_record, write_text

if TYPE_CHECKING:
    from drover.pipeline.contract.stage_work import Work


def report(work: Work) -> None:
    """Read the run, write both pages, and link them from the run folder itself."""
    from drover.pipeline.reporting.facts import collect
    from drover.pipeline.reporting.render import compose, html, markdown

    try:
        document = compose(collect(work.run))
        pages = {"report.html": html(document), "report.md": markdown(document)}
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise UserError(f"A stage of {work.run.folder} recorded something else than this version of Drover writes "
                        f"({type(error).__name__}: {str(error)[:200]}). Take the run's files from a copy, or rebuild "
                        f"the stages with --force.") from error
    for name, text in pages.items():
        write_text(work.folder / name, text)
        link = work.run.folder / name
        link.unlink(missing_ok=True)
        link.symlink_to(f"{work.name}/{name}")
    work.say(document.result)
    work.commit([output_record(work.folder, work.folder / name) for name in pages], {})
    work.say(f"open {(work.run.folder / 'report.html').absolute()}")


if __name__ == "__main__":
    from drover.pipeline.contract.entry import stage_main

    sys.exit(stage_main("report", report))
