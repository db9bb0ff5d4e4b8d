"""Training on a real Slurm as sites differ. Stand-ins for what this Slurm lacks refuse a request without their options,
and take these away."""

import shutil
import sys

import pytest
import yaml

from tests.conftest import REPOSITORY
from tests.refusal import table

pytestmark = pytest.mark.slow
PROGRAMS = {
    "sinfo": """#!/bin/bash
# sinfo of a site with GPUs, which stand in the place of (null).
{real} "$@" | sed "s/|(null)|/|${{GPUS:+gpu:$GPUS}}|/"
""",
    "sbatch": """#!/bin/bash
# sbatch of a site with GPUs of a type.
script=${{@: -1}}
if [ -n "$GPUS" ]; then
  grep -q "^#SBATCH --gpus-per-node=$GPUS$" "$script" || {{ echo "sbatch: error: no $GPUS" >&2; exit 1; }}
  sed "/^#SBATCH --gpus-per-node=/d" "$script" > "$script.here"
  set -- "${{@:1:$#-1}}" "$script.here"
fi
exec {real} "$@"
""",
    "srun": """#!/bin/bash
# srun with pyxis, where a container is named: it refuses to start a task without the mounts.
image= mounts= set= others=()
for word in "$@"; do case "$word" in
  --container-image=*) image=${{word#*=}} ;;
  --container-mounts=*) mounts=${{word#*=}} ;;
  --container-env=PYTHONPATH,*) set=yes ;;
  --container-workdir=*) ;;
  *) others+=("$word") ;;
esac; done
if [ -n "$image" ]; then
  [ "$image$set" = ours/drover:1yes ] || {{ echo "srun: error: pyxis: another image, or its PYTHONPATH" >&2; exit 1; }}
  [[ ",$mounts," == *",$RUN:$RUN,"* ]] || {{ echo "srun: error: pyxis: the run folder is not mounted" >&2; exit 1; }}
  echo pyxis >> {folder}/used
fi
exec {real} "${{others[@]}}"
""",
    "apptainer": """#!/bin/bash
# apptainer exec --bind=... --pwd=... IMAGE COMMAND
[ "$1" = exec ] && [[ " $* " == *" --bind=$RUN:$RUN "* ]] && [ "$MODULES" = cuda ] || exit 1
while [ "$1" != /ours.sif ]; do shift; done
echo apptainer >> {folder}/used
exec "${{@:2}}"
"""}


@pytest.mark.parametrize("launch, gpus, used", table("""
    {container: {image: "ours/drover:1", runtime: pyxis}, preflight: true} -> '' -> pyxis
    {container: {image: /ours.sif}, setup: [module load cuda]} -> '' -> apptainer
    {gpu_type: h100, gpus_per_node: 1, qos: normal, setup: [export CUDA_VISIBLE_DEVICES=0]} -> h100:1 -> ''
    {gpus_per_node: 2, request_gpus: false, setup: [export CUDA_VISIBLE_DEVICES=GPU-1]} -> '' -> ''
    {requeue: false} -> '' -> ''""", *[yaml.safe_load] * 3),
    ids=["pyxis", "apptainer, modules", "GPUs of a type, QOS", "a GPU for each task",
         "neither requeue nor accounting"])
def test_training_runs_as_the_site_asks(training, tmp_path, launch, gpus, used):
    """The preflight and the ranks are started inside of a container; the batch script and the runner are not."""
    fakes = tmp_path / "fakes"
    fakes.mkdir()
    for name, text in PROGRAMS.items():
        (fakes / name).write_text(text.format(folder=fakes, real=shutil.which(name)))
        (fakes / name).chmod(0o755)
    setup = [f"export PATH={fakes}:$PATH RUN={tmp_path}/runs/mini", "module() { export MODULES=$2; }",
             *launch.pop("setup", [])]
    run = training(faults="", train={"steps": 8}, launch={"python": sys.executable, "setup": setup, **launch})
    run.environment |= {"PATH": f"{fakes}:{run.environment['PATH']}", "GPUS": gpus}
    if not launch.get("requeue", True):
        run.cluster.stop_accounting()
    run.submit()
    run.wait_until_gone()
    assert run.state.status == "done", run.story()
    assert {*(fakes / "used").read_text().split()} == {used} if used else not (fakes / "used").exists()


def test_a_network_interface_that_is_not_there_stops_the_first_start(training):
    run = training(faults="", launch={"preflight": True, "environment": {"GLOO_SOCKET_IFNAME": "ib9"}})
    run.submit()
    run.wait_until_gone()
    assert (run.state.status, run.starts) == ("failed", []) and "ib9" in run.state.reason, run.story()
    assert "the same on all nodes" in run.state.reason and not (run.run / "launch/nodes.jsonl").exists()


def test_the_doctor_asks_slurm_and_writes_a_profile(cluster, tmp_path):
    profile = tmp_path / "mine.yaml"
    answer = cluster.run(sys.executable, "-m", "drover.launch.doctor", "--write", profile, cwd=REPOSITORY)
    assert "partition debug*" in answer.stdout and "partition: debug\n" in profile.read_text()
