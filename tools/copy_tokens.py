"""`drover copy-tokens RUN --to URL`: a finished run's token shards into an object store.

Training downloads them from there with `train.tokens_from=URL`. What is there already is not sent again. With
`--compare` every shard is read back and its hash compared, which costs as much traffic as sending it.
"""

from __future__ import annotations

import argparse
import sys

from drover.pipeline.config.kinds import add_run_and_plugins
from drover.pipeline.contract.locks import lock
from drover.pipeline.contract.run import run_in
from drover.pipeline.core.console import Parser, Program, ProgressBar, counted, say


def add_options(parser: Parser) -> None:
    """The options."""
    add_run_and_plugins(parser)
    parser.add_argument("--to", required=True, metavar="URL", help="s3://bucket/prefix, gs://, az://, file://")
    parser.add_argument("--compare", action="store_true", help="read every shard back and compare its hash")


def work(options: argparse.Namespace) -> None:
    """Copy, and compare if --compare is given."""
    run = run_in(options.run)
    from drover.pipeline.data.remote_tokens import upload_shards
    from drover.pipeline.storage.mirror import Mirror
    from drover.pipeline.storage.store import Store

    manifest, folder = run.finished("encode"), run.stage_folder("encode")
    held = lock(folder.parent, "encode", shared=True)  # so that nobody rebuilds the shards meanwhile
    with ProgressBar("copy", "token shards", len(manifest.outputs), "shards") as progress:
        copied = upload_shards(folder, manifest.outputs, options.to, progress.advance)
    say("copy", f"{copied} in {options.to}")
    if options.compare:
        with ProgressBar("copy", "reading back", len(manifest.outputs), "shards") as progress:
            Mirror(Store(options.to)).compare(manifest.outputs, progress.advance)
        say("copy", f"{counted(len(manifest.outputs), 'shard')} in {options.to} compared with the recorded hashes")
    del held


main = Program("python -m drover.tools.copy_tokens", __doc__, add_options, work)

if __name__ == "__main__":
    sys.exit(main())
