"""Files of the tests that failed in the last run of pytest, to run them once more and alone (`make test-again`).

A test of real processes, kills and clusters can fail where a machine is slow and shared, though nothing is wrong. It
is a fault of the test all the same, and said; but it is told from a fault of the product: that one fails again. Whole
files are run, because some tests go on where the one before ended. Where many failed it is no coincidence: nothing is
run.
"""

from __future__ import annotations

import sys

from drover.pipeline.core.files import read_json
from tests.conftest import REPOSITORY

MOST = 4
"""Tests that may fail on a busy machine in one run of thousands."""
FAILED = REPOSITORY / ".pytest_cache/v/cache/lastfailed"


def main() -> int:
    """Print the files for a command line; exit status 1 where running them again would say nothing."""
    failed = sorted(read_json(FAILED) if FAILED.is_file() else ())
    if not 0 < len(failed) <= MOST:
        print(f"{len(failed)} tests failed: not run again (that is for 1 to {MOST})", file=sys.stderr)
        return 1
    print(f"run again, alone, and to be mended even if they pass now: {', '.join(failed)}", file=sys.stderr)
    print(*sorted({test.partition("::")[0] for test in failed}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
