"""Fetch an export or a checkpoint that was copied to an object store, each file compared with its hash.

    python -m drover.pipeline.copies s3://bucket/models/mine models/mine

Where it was killed it leaves a hidden folder `.mine-...` beside, which may be removed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from drover.pipeline.copies.export import fetch_copy
from drover.pipeline.errors import UserError, is_full_disk


def main(arguments: list[str] | None = None) -> int:
    """The command; its exit status."""
    parser = argparse.ArgumentParser(prog="python -m drover.pipeline.copies", description=__doc__.splitlines()[0])
    parser.add_argument("url", help="where convert.copy_to or train.checkpoint.copy_to (and /step-...) put it")
    parser.add_argument("folder", type=Path, help="a new folder")
    options = parser.parse_args(arguments)
    try:
        size = fetch_copy(options.url, options.folder)
    except (UserError, OSError) as error:
        if isinstance(error, OSError) and not is_full_disk(error):
            raise
        print(error, file=sys.stderr)
        return UserError.exit_status
    print(f"{options.folder}: {size / 1e6:,.1f} MB, every file as it was copied")
    return 0


if __name__ == "__main__":
    sys.exit(main())
