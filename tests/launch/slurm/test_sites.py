"""Containers: how each runtime starts a stage, and that the batch script stays outside."""

import sys
from pathlib import Path

import pytest
import yaml

from drover.launch.job.host import JobSpec
from drover.launch.job.srun import srun_command
from drover.launch.plan import in_container
from drover.pipeline.config.launching import Container
from tests.conftest import REPOSITORY
from tests.refusal import table

PYTHON = "/opt/venv/bin/python"
TWO_NODES = ("--stage encode,train --cluster slurm --dry-run --no-rehearse launch.gpus_per_node=8 launch.train.nodes=2 "
             f"launch.python={PYTHON}")


@pytest.mark.parametrize("container, wrap, srun_args", table("""
    {image: /shared/drover.sif, mounts: [/data, "/scratch:/tmp"]} -> apptainer exec --nv --bind=/runs:/runs \
--bind=/work:/work --bind=/data:/data --bind=/scratch:/tmp --pwd=/work /shared/drover.sif -> ''
    {image: "ours/drover:1", runtime: podman, options: [--shm-size=8g]} -> podman --cgroup-manager=cgroupfs run --rm \
--env-host --network=host --ipc=host --pid=host --cgroups=no-conmon --env=PYTHONPATH --env=A \
--device=nvidia.com/gpu=all --volume=/runs:/runs --volume=/work:/work --workdir=/work --shm-size=8g ours/drover:1 -> ''
    {image: "ours/drover:1", runtime: pyxis, mounts: [/data]} -> '' -> --container-image=ours/drover:1 \
--container-mounts=/runs:/runs,/work:/work,/data:/data --container-workdir=/work --container-env=PYTHONPATH,A
    {} -> '' -> ''""", *[yaml.safe_load] * 3))
def test_how_a_container_starts_a_stage(container, wrap, srun_args):
    assert in_container(Container(**container), [Path("/runs"), Path("/work")], 8, ["PYTHONPATH", "A"]) == (
        wrap.split(), srun_args.split())


@pytest.mark.parametrize("changes, python", [
    ({"srun_args": ("--container-image=i",)}, PYTHON), ({"wrap": ("apptainer", "exec", "i")}, sys.executable)])
def test_pyxis_starts_each_rank_inside_and_other_containers_behind_it(changes, python):
    """The rank's own program runs with the Python that is there."""
    job = JobSpec("t", "train", (PYTHON, "-m", "x"), run="/runs/t", chain="c", **changes)
    command = srun_command(job, Path("/logs"), [*job.wrap, *job.command])
    at = command.index("drover.launch.job.rank")
    assert command[at - 2:] == [python, "-m", command[at], "train", "0", "0", *job.wrap, *job.command]
    assert ("--container-image=i" in command[:at]) == (not job.wrap)


def test_the_dry_run_shows_the_container(launcher):
    shown = launcher.accepted(TWO_NODES, "launch.container={image: i, runtime: pyxis}")
    mounts = f"--container-mounts={launcher.run}:{launcher.run},{launcher.work}:{launcher.work}"
    assert "srun --container-image=i " in shown and mounts in shown and "--container-env=PYTHONPATH," in shown
    assert f" {PYTHON} -m drover.pipeline.train" in shown


def test_packages_of_another_python_are_not_judged_by_this_one(launcher):
    """This Python has everything that the configuration needs; what the other one lacks, its nodes would tell."""
    assert "train" in launcher.accepted(TWO_NODES, "train.log_to=[mlflow]")


@pytest.mark.parametrize("path", sorted((REPOSITORY / "configs").glob("llama3*.yaml")), ids=lambda path: path.stem)
def test_recipes_leave_the_site_to_its_profile(path):
    assert "launch" not in yaml.safe_load(path.read_text())
