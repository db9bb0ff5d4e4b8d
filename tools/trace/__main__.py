"""Which documents did a training step see, and which steps saw a document?

    drover trace runs/demo --step 120 --text
    drover trace runs/demo --samples 304 320 --text
    drover trace runs/demo --document 1f3a9c04
    drover trace runs/demo --id pages.jsonl:17 --id https://example.org/a

Nothing is stored for this: the order of samples is a function of the sample number, and is computed again. For a
document it is computed for every sample: 100 million in about a minute.
"""

from __future__ import annotations

import argparse
import sys

from drover.pipeline.config.kinds import add_run_and_plugins
from drover.pipeline.core.console import Parser, Program, add_json


def add_options(parser: Parser) -> None:
    """The options."""
    add_run_and_plugins(parser)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--step", type=int, metavar="N", help="optimizer step, counted from 1 as in metrics.jsonl")
    what.add_argument("--samples", type=int, nargs=2, metavar=("FIRST", "END"),
                      help="samples [FIRST, END) instead of a step, e.g. those that a rollback left out")
    what.add_argument("--document", metavar="KEY", help="the document with this key, or with these first digits")
    what.add_argument("--id", action="append", help="documents with this id: one of their own, file:record or "
                      "file@offset, or a page's URL (may be given several times); searches the text shards, and what "
                      "is listed of the others")
    parser.add_argument("--text", action="store_true", help="print the text of each piece or document")
    add_json(parser)


def work(options: argparse.Namespace) -> None:
    """Search and print."""
    from drover.pipeline.contract.run import run_in

    run = run_in(options.run)
    from drover.tools.trace.tracing import Search, show_documents, show_samples

    show = show_documents if options.step is None and options.samples is None else show_samples
    show(Search(run), options)


main = Program("python -m drover.tools.trace", __doc__, add_options, work)

if __name__ == "__main__":
    sys.exit(main())
