"""The Slurm lab: what needs no Slurm always, the rest where Slurm's packages are."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import psutil
import pytest

from drover.pipeline.core.errors import UserError
from tests import slurm_lab
from tests.conftest import run_python
from tests.refusal import refused
from tests.slurm_lab import Lab, missing_programs
from tests.waiting import wait_for

needs_slurm = pytest.mark.skipif(bool(missing_programs()), reason=f"not installed: {', '.join(missing_programs())}")


@pytest.fixture
def short_folder():
    """A folder whose path leaves room for Slurm's sockets; labs left in it are taken down."""
    folder = Path(tempfile.mkdtemp(prefix="lab-", dir="/tmp"))
    yield folder
    for inside in folder.iterdir():
        Lab(inside).down()
    shutil.rmtree(folder)


def command(*arguments):
    return run_python("-m", "tests.slurm_lab", *arguments, check=False)


def processes_of(folder):
    """The command lines of all that was started for a lab: they or their environment name its folder."""
    result = [process.info for process in psutil.process_iter(["pid", "cmdline", "environ"])]
    return [info["cmdline"] for info in result if info["pid"] != os.getpid() and str(folder) in str(info)]


@pytest.mark.slow
@needs_slurm
def test_labs_live_side_by_side_and_go_without_a_trace(short_folder):
    """What happens to jobs, and on nodes that are lost, is tested in tests/slurm."""
    def ask(lab, *words):
        return subprocess.run(words, env={**os.environ, **lab.environment()}, cwd=lab.folder, text=True,
                              capture_output=True)
    first, second = Lab(short_folder / "a"), Lab(short_folder / "b")
    started = command("up", "2", "--folder", first.folder)
    assert started.stdout == f"export SLURM_CONF={first.folder}/slurm.conf\n", started.stderr
    again = command("up", "--folder", first.folder)
    assert again.stdout == started.stdout and "running already, with 2 nodes" in again.stderr
    second.up(1)
    assert second.node_states() == {"n1": "idle"} and first.node_states() == {"n1": "idle", "n2": "idle"}
    for lab in (first, second):
        submitted = ask(lab, "sbatch", "--output=out", "--wrap=echo started; sleep 300")
        assert submitted.stdout == "Submitted batch job 1\n", submitted.stderr
    out = second.folder / "out"
    wait_for(lambda: out.exists() and "started" in out.read_text())
    assert len(processes_of(first.folder)) > 4 and command("down", "--folder", first.folder).returncode == 0
    assert processes_of(first.folder) == [] and not first.folder.exists()
    assert second.is_up and len(processes_of(second.folder)) > 4
    second.down(keep=True)
    assert processes_of(second.folder) == [] and (second.folder / "log" / "slurmctld.log").exists()
    second.down()
    assert list(short_folder.iterdir()) == []


def test_without_slurm_it_says_what_to_install(monkeypatch, short_folder):
    monkeypatch.setattr(slurm_lab, "_which", lambda program: None if program == "slurmd" else "/bin/true")
    refused(UserError, r"no slurmd\. On Debian or Ubuntu .*slurm_lab install", Lab(short_folder / "a").up, 1)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    refused(UserError, r"sudo apt-get install .*slurm-wlm slurmdbd munge mariadb-server", slurm_lab.install)


def test_a_folder_with_other_files_is_refused(short_folder, monkeypatch):
    (short_folder / "letter.txt").write_text("dear")
    monkeypatch.setattr(slurm_lab, "_which", lambda program: "/bin/true")
    refused(UserError, "holds something that is not a Slurm lab", Lab(short_folder).up, 1)
    refused(UserError, "There is no Slurm lab in", Lab(short_folder).start_node, "n1")
    assert (short_folder / "letter.txt").exists()
