"""A stage of twelve tasks in processes of its own, which can be held, killed and asked to stop in the midst of them.

Variables of its environment: LOG, a file that gets a line for each task that is started; HELD, from which task on they
wait for the file GATE with their output half-written; AFTER, whether the stage waits for it after the last one; GRACE,
the share of the time before a limit that tasks may take.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from drover.pipeline.contract import workers
from drover.pipeline.contract.entry import stage_main
from drover.pipeline.contract.stage_work import Task
from drover.pipeline.core.files import append_line, atomic_file, output_record


def make(folder, number):
    with atomic_file(folder / f"{number}.txt", "w") as file:
        file.write(str(number) * 1000)
        append_line(Path(os.environ["LOG"]), {"task": number, "process": os.getpid()})
        while number >= int(os.environ["HELD"]) and not Path(os.environ["GATE"]).exists():
            time.sleep(0.005)
    return {"outputs": [output_record(folder, folder / f"{number}.txt")]}


def body(work):
    records = work.run_pass("read", [Task(str(number), number) for number in range(12)], make)
    while os.environ.get("AFTER") and not Path(os.environ["GATE"]).exists():
        append_line(Path(os.environ["LOG"]), {"after": 1})
        time.sleep(0.005)
    work.commit([output for record in records for output in record["outputs"]], {"docs": 12})


if __name__ == "__main__":
    workers.GRACE = float(os.environ.get("GRACE", workers.GRACE))
    sys.exit(stage_main("shard", body))
