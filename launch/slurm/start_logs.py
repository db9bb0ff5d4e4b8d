"""The logs of a stage's starts in `logs/<stage>/<job>.<start>/`: one file for each node; on one machine one file.

Slurm writes the rank before each line of a node's file (`srun --label`). It splits lines of more than PIECE bytes into
lines of that length, each with the label. No other rank's line can come between the pieces.
"""

from __future__ import annotations

import os
import shutil
import textwrap
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from drover.launch.processes import Say
from drover.pipeline.core.files import opened

ONE_PROCESS = "output.log"
PIECE = 1024
BLOCK = 1 << 16
MOST = 1000
"""The longest cause, in characters."""
MOST_SHOWN = 1 << 24
"""Bytes of a log that are read, the last ones."""
KEPT = 30
"""Number of starts, the newest ones, that keep their folders."""


def rank_log(folder: Path, rank: int, ranks_per_node: int) -> Path:
    """The file with a rank's output."""
    alone = folder / ONE_PROCESS
    return alone if alone.exists() else folder / f"node{rank // ranks_per_node}.log"


def output(file: IO[bytes], rank: int) -> Iterator[bytes]:
    """The new content of a log, from the file's position. Of a node's log, the complete lines of one rank."""
    if Path(file.name).name == ONE_PROCESS:
        return iter(lambda: file.read(BLOCK), b"")
    return (piece for label, piece in labelled(file) if label == rank)


def skip(file: IO[bytes]) -> int:
    """Go to the last MOST_SHOWN bytes of a log; how many are before them."""
    return file.seek(max(0, os.fstat(file.fileno()).st_size - MOST_SHOWN))


def labelled(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """The rank and the text of each new line of a node's log, without the newlines that Slurm inserted."""
    while (line := file.readline()).endswith(b"\n"):
        label, _, text = line.partition(b": ")
        if label.strip().isdigit():
            yield int(label), text if len(text) <= PIECE else text[:-1]
    file.seek(-len(line), os.SEEK_CUR)  # Slurm is still writing this one


def last_lines(folder: Path, rank: int, ranks_per_node: int, count: int) -> list[str]:
    """The last lines of a rank, each with the rank, or of all ranks that share its log; [] without a log. Slurm's own
    last line, that it ends the step, is left out."""
    try:
        with opened(rank_log(folder, rank, ranks_per_node)) as file:
            skip(file)
            text = b"".join(deque(output(file, rank), 1000)).decode(errors="replace")
    except OSError:
        return []
    lines = [line for line in text.splitlines() if line.strip() and " error: *** STEP " not in line]
    who = "output" if (folder / ONE_PROCESS).exists() else f"rank {rank}"  # a process's ranks share it
    return [f"{who}: {line}" for line in lines[-count:]]


def last_word(lines: Sequence[str]) -> str:
    """Why a rank ended, by its `last_lines`: its last complaint, which may have several lines, or else the last line.
    """
    begins = max((at for at, line in enumerate(lines) if ": error: " in line), default=-1)
    words = [line.partition(": ")[2] if number else line for number, line in enumerate(lines[begins:])]
    return textwrap.shorten(" ".join(words), MOST, placeholder=" ...")


def prune(folder: Path, job: str, say: Say) -> None:
    """Remove the folders of old starts.

    job: the job that starts. The elements of an array run at the same time: each prunes the starts of its own index.
    """
    index = job.partition("_")[2]
    starts = [path for path in folder.glob("*.*") if path.name.partition(".")[0].partition("_")[2] == index]
    with suppress(OSError):
        starts.sort(key=lambda path: path.stat().st_mtime)
        if old := starts[:-KEPT]:
            for path in old:
                shutil.rmtree(path)
            say(f"removed logs of old starts from {folder}: {', '.join(path.name for path in old)}")
