"""A process that is killed before a change that it makes to files: each moment between two can be tried in turn.

    python -m tests.cut_off PATTERN NUMBER drover.pipeline.shard --config run.yaml ...

runs a module that way: it dies of SIGKILL before its change of that number, counted from 1, of a path with the pattern.
An fsync is a change, too.
"""

import itertools
import os
import re
import runpy
import signal
import sys
import threading
from pathlib import Path

from tests.conftest import environment, warm_server
from tests.waiting import HANG_S

CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.symlink", "os.link")


def kill_before(pattern, number):
    """Kill this process before its change of that number of a file or folder with the pattern in its path."""
    changes, wanted, lock = itertools.count(1), re.compile(pattern), threading.Lock()

    def hook(event, arguments):
        opened = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if (opened or event in CHANGES) and isinstance(arguments[0], (str, bytes, os.PathLike)):
            path = os.fsdecode(arguments[0])
            with lock:
                # shutil.rmtree removes names within an open folder.
                if ("/" not in path or wanted.search(path)) and next(changes) == number:
                    os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)
    fsync = os.fsync

    def synced(descriptor):  # of which there is no event
        hook("os.truncate", (str(Path(f"/proc/self/fd/{descriptor}").readlink()),))
        fsync(descriptor)
    os.fsync = synced


def cut_off(function, place, number):
    """Call `function` in a fork of this process that dies before its change of that number in `place`; its status."""
    pid = os.fork()
    if not pid:
        status = 99
        try:
            kill_before(re.escape(str(place)), number)
            status = function()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def cut_off_stage(stage, number, *arguments, pattern="/runs/", ranks=1):
    """Run a stage of which a process dies before its change of that number; its status and all that was printed."""
    process = warm_server().start(["tests.cut_off", pattern, str(number), f"drover.pipeline.{stage}", *arguments],
                                  environment(), ranks=ranks)
    output = "".join(process.communicate(HANG_S))
    return process.wait(), output


if __name__ == "__main__":
    before, which, module, *sys.argv[1:] = sys.argv[1:]
    kill_before(before, int(which))
    sys.modules.pop(module, None)
    runpy.run_module(module, run_name="__main__", alter_sys=True)
