"""Sites as they are: what sbatch and srun get for each, as lines beside those of a bare site."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from drover.launch.plan import in_container
from drover.launch.slurm.job.srun import srun_command
from drover.launch.slurm.jobspec import JobSpec
from drover.pipeline.config.launching import Container
from tests.conftest import REPOSITORY
from tests.launch.slurm.submit.test_sbatch import scripts

TWO_NODES = ("--stage", "encode,train", "--cluster", "slurm", "--dry-run", "--no-rehearse", "launch.gpus_per_node=8",
             "launch.train.nodes=2")
SIF, PYTHON = "/shared/drover.sif", "/opt/venv/bin/python"
SITES = {
    "pyxis": ({"container": {"image": "ours/drover:1", "runtime": "pyxis"}, "python": PYTHON}, set(), set()),
    "apptainer with modules": (
        {"container": {"image": SIF}, "python": PYTHON, "setup": ["module load apptainer"]},
        {"module load apptainer"}, set()),
    "typed GRES with QOS": (
        {"gpu_type": "h100", "qos": "high", "account": "physics"},
        {"#SBATCH --gpus-per-node=h100:8", "#SBATCH --qos=high", "#SBATCH --account=physics"},
        {"#SBATCH --gpus-per-node=8"}),
    "AMD": (
        {"srun_args": ["--gpu-bind=none"], "environment": {"HSA_FORCE_FINE_GRAIN_PCIE": "1"},
         "health_check": ["/opt/site/check"]}, set(), set()),
    "neither requeue nor accounting": (
        {"requeue": False, "train.links": 2}, {"#SBATCH --no-requeue"}, {"#SBATCH --requeue"}),
}
"""Settings of the section launch; lines of the train job's script that a bare site has not, and that it has instead."""


def script(launcher, settings):
    """The lines of a train job's script."""
    shown = launcher.accepted(*TWO_NODES, *(f"launch.{name}={json.dumps(value)}" for name, value in settings.items()))
    found = scripts(shown)
    text = next(found[key] for key in ("train", "train-1") if key in found)
    subprocess.run(["/bin/bash", "-n"], input=text, text=True, check=True)
    assert len(text.splitlines()) < 40
    encode = [line for key, one in found.items() if key.startswith("encode") for line in one.splitlines()]
    assert not any("gpus" in line for line in encode), "jobs without ranks ask for no GPU"
    return [line for line in text.splitlines() if not any(
        word in line for word in ("sha256sum", "job.runner", "--comment", " check ", "--job-name", "137"))]


@pytest.mark.parametrize("name", SITES)
def test_what_sbatch_gets(launcher, name):
    settings, added, gone = SITES[name]
    bare, here = set(script(launcher, {})), set(script(launcher, settings))
    assert (here - bare, bare - here) == (added, gone)


@pytest.mark.parametrize(("container", "wrap", "srun_args"), [
    ({"image": SIF, "mounts": ["/data", "/scratch:/tmp"]},
     ["apptainer", "exec", "--nv", "--bind=/runs:/runs", "--bind=/work:/work", "--bind=/data:/data",
      "--bind=/scratch:/tmp", "--pwd=/work", SIF], []),
    ({"image": "ours/drover:1", "runtime": "podman", "options": ["--shm-size=8g"]},
     ["podman", "run", "--rm", "--env-host", "--network=host", "--ipc=host", "--pid=host",
      "--cgroups=disabled", "--env=PYTHONPATH", "--env=A",
      "--device=nvidia.com/gpu=all", "--volume=/runs:/runs", "--volume=/work:/work", "--workdir=/work",
      "--shm-size=8g", "ours/drover:1"], []),
    ({"image": "ours/drover:1", "runtime": "pyxis", "mounts": ["/data"]}, [],
     ["--container-image=ours/drover:1", "--container-mounts=/runs:/runs,/work:/work,/data:/data",
      "--container-workdir=/work", "--container-env=PYTHONPATH,A"]),
    ({}, [], [])])
def test_how_a_container_starts_a_stage(container, wrap, srun_args):
    assert in_container(Container(**container), [Path("/runs"), Path("/work")], 8, ["PYTHONPATH", "A"]) == (
        wrap, srun_args)


def spec(**changes):
    return JobSpec("t", "train", (PYTHON, "-m", "x"), run="/runs/t", chain="c", ranks=2, nodes=2, code="/runs/t/code/c",
                   code_sha256="0" * 64, **changes)


def test_pyxis_starts_each_rank_inside_and_other_containers_behind_it():
    """The rank's own program runs with the Python that is there. Neither copies the code to the node."""
    for job, python in ((spec(srun_args=("--container-image=i",), contained=True), PYTHON),
                        (spec(wrap=("apptainer", "exec", "i"), contained=True), sys.executable)):
        command = srun_command(job, Path("/logs"), [*job.wrap, *job.command])
        at = command.index("drover.launch.slurm.job.rank")
        assert command[at - 2:at] == [python, "-m"] and command[at + 2:] == [*job.wrap, *job.command]
        assert ("--container-image=i" in command[:at]) == (not job.wrap)
        assert "-I" not in command[:at]
    assert "-I" in srun_command(spec(), Path("/logs"), [PYTHON])


def test_the_dry_run_shows_the_container(launcher):
    shown = launcher.accepted(*TWO_NODES, f"launch.python={PYTHON}", "launch.container={image: i, runtime: pyxis}")
    assert "srun --container-image=i " in shown and f" {PYTHON} -m drover.pipeline.train" in shown


@pytest.mark.parametrize("extra", ["container-image", "container-mounts"])
def test_a_container_of_the_batch_script_is_refused_with_the_setting(launcher, extra):
    assert "Use launch.container" in launcher.refused(*TWO_NODES, f'launch.extra={{"{extra}": "x"}}')


def test_packages_of_another_python_are_not_judged_by_this_one(launcher):
    """This Python has everything that the configuration needs; what the other one lacks, its nodes would tell."""
    assert "train" in launcher.accepted(*TWO_NODES, "train.log_to=[mlflow]", f"launch.python={PYTHON}")


@pytest.mark.parametrize("path", sorted((REPOSITORY / "configs").glob("llama3*.yaml")), ids=lambda path: path.stem)
def test_recipes_leave_the_site_to_its_profile(path):
    assert "launch" not in yaml.safe_load(path.read_text())
