"""What belongs together is dealt out together, under the installed versions of pytest and pytest-xdist."""

from __future__ import annotations

import subprocess
import sys

from tests.conftest import REPOSITORY
from tests.scheduling import unit
from tests.waiting import HANG_S


def test_a_file_a_cluster_and_a_test_of_its_own():
    units = [unit(nodeid, REPOSITORY) for nodeid in (
        "tests/model/test_rope.py::test_a", "tests/model/test_rope.py::test_b[x::y]",
        "tests/slurm/test_chain.py::test_a", "tests/slurm/test_queueing.py::test_a",
        "tests/slurm/test_one_job.py::test_a",
        "tests/stages/test_train.py::test_a", "tests/stages/test_train.py::test_b",
        "tests/stages/test_convert.py::test_a", "tests/stages/test_convert.py::test_b")]
    assert units[0] == units[1] and units[2] == units[3] != units[4]
    assert units[5] != units[6] and units[7] == units[8] == "tests/stages/test_convert.py"


def test_no_file_is_split_between_workers():
    files = ["tests/training/optimizers/test_schedule.py", "tests/config/test_batch.py",
             "tests/model/test_attention.py"]
    answer = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-n", "2", "--dist", "loadscope", "-p", "no:cacheprovider", *files],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=HANG_S, check=True)
    done = {(line.split()[0], file) for line in answer.stdout.splitlines() for file in files
            if line.startswith("[gw") and f" {file}::" in line}
    assert len(done) == len(files), answer.stdout
