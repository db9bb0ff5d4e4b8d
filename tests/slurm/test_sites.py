"""Training on a real Slurm inside a container, whose program is a stand-in that checks what it is given."""

from __future__ import annotations

import shutil
import sys

import pytest

pytestmark = pytest.mark.slow
SRUN = """#!/bin/bash
# srun with pyxis: takes the options of the container away, and refuses to start a task without the mounts.
image= mounts= set= others=()
for word in "$@"; do case "$word" in
  --container-image=*) image=${{word#*=}} ;;
  --container-mounts=*) mounts=${{word#*=}} ;;
  --container-env=PYTHONPATH,*) set=yes ;;
  --container-workdir=*) ;;
  *) others+=("$word") ;;
esac; done
[ "$image" = ours/drover:1 ] || {{ echo "srun: error: pyxis: no image" >&2; exit 1; }}
[ "$set" = yes ] || {{ echo "srun: error: pyxis: the image's PYTHONPATH would hold" >&2; exit 1; }}
[[ ",$mounts," == *",$RUN:$RUN,"* ]] || {{ echo "srun: error: pyxis: the run folder is not mounted" >&2; exit 1; }}
echo "$image" >> {folder}/started
export INSIDE=pyxis
exec {srun} "${{others[@]}}"
"""


def test_training_runs_inside_a_container_on_two_nodes(training, tmp_path):
    """The preflight and every rank are started inside; the batch script and the runner are not. What a command in front
    of a stage's does, as apptainer's, tests/slurm/test_arrays.py shows."""
    fakes = tmp_path / "fakes"
    fakes.mkdir()
    (fakes / "srun").write_text(SRUN.format(folder=fakes, srun=shutil.which("srun")))
    (fakes / "srun").chmod(0o755)
    run = training(faults="", train={"steps": 8}, launch={
        "preflight": True, "python": sys.executable, "setup": [
            f"export PATH={fakes}:$PATH", f"export RUN={tmp_path}/runs/mini", 'test -z "$INSIDE" || exit 1'],
        "container": {"image": "ours/drover:1", "runtime": "pyxis", "mounts": [str(tmp_path)]}})
    run.submit()
    run.wait_until_gone()
    assert run.state.status == "done", run.story()
    started = (fakes / "started").read_text().split()
    assert set(started) == {"ours/drover:1"} and len(started) >= 2
