"""torch's elastic agent for one box, with manners: quiet on the terminal, true exit codes, no orphans.

    python -m launch.agent LOGFILE [torchrun's own arguments]

The agent's log and its account of failed workers go to LOGFILE; a stage's own words are all that the terminal shows.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time

GRACE_S = 20.0
"""How long workers may take to save and end after the launcher was killed."""


def main(arguments: list[str]) -> int:
    """Run the agent; the exit status of the first worker that failed, or 0."""
    threading.Thread(target=_end_after, args=(os.getppid(),), daemon=True).start()
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logger = _log_to(arguments[0])
    try:
        run.run(run.parse_args(arguments[1:]))
    except ChildFailedError as error:
        logger.error("%s", error)
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as error:
        logger.warning("%s", error)
        return 128 + error.sigval
    return 0


def _log_to(path: str) -> logging.Logger:
    """Send everything that torch logs in this process to the file."""
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("agent %(levelname).1s %(asctime)s %(name)s: %(message)s"))
    for name in [name for name in logging.root.manager.loggerDict if name.split(".")[0] == "torch"]:
        logger = logging.getLogger(name)
        if logger.handlers:
            logger.handlers[:] = [handler]
    logging.root.handlers[:] = [handler]
    return logging.getLogger("torch.distributed")


def _end_after(parent: int) -> None:
    """The kernel sends SIGTERM when the launcher dies and the workers wind up; those that do not are ended here."""
    while os.getppid() == parent:
        time.sleep(0.5)
    time.sleep(GRACE_S)
    os._exit(1)  # the workers notice (pipeline.contract.orphans) and end


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
