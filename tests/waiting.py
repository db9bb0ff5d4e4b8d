"""Waiting for what must happen, with a limit for hangs only."""

from pathlib import Path
from time import monotonic, sleep

HANG_S = 900
"""After so long a process or a condition counts as hung. No test may depend on it: where everything takes ten times as
long as on a fast machine, the slowest wait is still far from it. pytest's own limit (pyproject.toml) is beyond it, so
that the one who waits is the one who complains."""


def wait_for(condition, story=str, *, of=None):
    """Wait until `condition()` gives something true, and give that.

    Args:
        story: what to tell if it never does.
        of: the process (with `poll` and `returncode`) that should bring it about; its end before that is a failure.
    """
    until = monotonic() + HANG_S
    while not (found := condition()):
        assert of is None or of.poll() is None or condition(), \
            f"ended with {of.returncode} before that {story()}{_output(of)}"
        assert monotonic() < until, f"waited in vain {story()}"
        sleep(0.02)
    return found


def runs(note):
    """Whether the process whose id a file holds is there, and no zombie."""
    try:
        return Path("/proc", note.read_text().strip(), "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def process_words(pid, name="cmdline"):
    """The words in a file of a process, such as its command; [""] once it has ended."""
    try:
        return Path("/proc", str(pid), name).read_text(errors="replace").split("\0")
    except OSError:
        return [""]


def _output(process):
    """What an ended process printed, where that was kept."""
    return "".join(f"\n{said}" for said in process.communicate() if said)
