"""What the command lines of the launcher share."""

from __future__ import annotations

import sys
from collections.abc import Callable

from drover.pipeline.errors import UserError, printable


def exit_status(work: Callable[[], int], stopped: str = "") -> int:
    """Do the work of a command; its exit status. What the user can mend is printed. stopped: what Ctrl-C says."""
    try:
        return work()
    except UserError as error:
        sys.stdout.flush()
        print(f"\n{printable(f'drover stops here: {error}')}", file=sys.stderr, flush=True)
        return error.exit_status
    except KeyboardInterrupt:
        print(f"\n{stopped}", file=sys.stderr, flush=True)
        return 130
    except BrokenPipeError:  # `| head` has seen enough
        sys.stderr.close()
        return 1
