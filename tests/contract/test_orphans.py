"""Processes of a killed parent end by themselves."""

import os
import signal
import subprocess
import sys

from tests.conftest import REPOSITORY
from tests.waiting import wait_for

CHILD = "import os, sys, time; from pipeline.contract.orphans import end_with_parent; " \
        "end_with_parent(int(sys.argv[1])); print(os.getpid(), flush=True); time.sleep(3600)"
PARENT = f"import os, subprocess, sys, time; " \
         f"subprocess.Popen([sys.executable, '-c', {CHILD!r}, str(os.getpid())]); time.sleep(3600)"


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_child_ends_with_its_killed_parent():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    assert alive(child)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    wait_for(lambda: not alive(child), lambda: f"the end of {child}")
