"""What a job requests: the user's own options over ours, once; whose Python runs what; containers."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from drover.launch.job.host import JobSpec
from drover.launch.job.srun import srun_command
from drover.launch.plan import in_container
from drover.launch.slurm.options import outer_python, setup_lines
from drover.pipeline.config.launching import Container, LaunchConfig
from tests.launch.launcher import planned
from tests.refusal import table

DRY = "--cluster slurm --dry-run"
OURS = shlex.quote(sys.executable)


@pytest.fixture
def requested(launcher):
    """Gives the parameters of a train job on two nodes with 8 GPUs each."""
    def made(**launch):
        settings = {"gpus_per_node": 8, "train.nodes": 2, **launch}
        return planned(launcher.accepted(f"--stage train {DRY}", *(
            f"launch.{name}={json.dumps(value)}" for name, value in settings.items())))["train"]
    launcher.done("shard", "tokenizer", "encode")
    return made


@pytest.mark.parametrize("name, value", table("""
    gres -> gpu:h100:8
    gpus_per_node -> h100:8
    --gpus-per-node -> h100:8
    gpus -> 16
    gpus-per-task -> h100:1
    gres -> nvme:1,gpu:8""", str, yaml.safe_load))
def test_gpus_are_asked_for_once(requested, name, value):
    job = requested(extra={name: value})
    assert [str(given) for key, given in job.items() if key.startswith(("gres", "gpus"))] == [str(value)]


def test_other_options_and_the_type_of_the_gpus(requested):
    job = requested(gpu_type="h100", extra={"gres": "nvme:1", "exclusive": True, "overcommit": False})
    assert (job["exclusive"], job["gpus_per_node"], job["gres"]) == (True, "h100:8", "nvme:1")
    assert "overcommit" not in job and "gpus-per-node" not in job


@pytest.mark.parametrize("setting, problem", table("""
    extra={"partition": "big"} -> launch.extra has partition, which the launcher sets itself. Remove it
    train.extra={"kill_on_invalid_dep": "no"} -> launch.train.extra has kill_on_invalid_dep, which the launcher
    extra={"container-image": "x"} -> launch.extra has container-image
    extra={"constraint": "a\\ntouch x"} -> launch.extra has 'constraint' with a line end
    train.extra={"a\\ntouch x": 1} -> launch.train.extra has 'a\\ntouch x' with a line end
    srun_args=["--x=\\n"] -> launch.srun_args has '--x' with a line end
    srun_args=[--nodes=7] -> launch.srun_args has --nodes, which the launcher
    srun_args=[--mem-bind=local, -N7] -> launch.srun_args has -N7. Write the option's long name."""))
def test_options_that_contradict_the_job_are_refused(launcher, setting, problem):
    assert problem in launcher.refused(f"--stage train {DRY}", f"launch.{setting}")


def test_a_health_check_needs_the_preflight(launcher):
    assert "launch.health_check is part of the preflight" in launcher.refused(
        f"--stage train {DRY}", "launch.preflight=false", "launch.health_check=[dcgmi]")


@pytest.mark.parametrize("launch, python", table(f"""
    {{"python": "/shared/my venv/bin/python"}} -> '/shared/my venv/bin/python'
    {{"python": "python3", "wrap": ["apptainer", "exec", "x.sif"]}} -> {OURS}
    {{"python": "python3", "wrap": ["x"], "runner_python": "/shared/bin/python"}} -> /shared/bin/python
    {{"runner_python": "/shared/bin/python"}} -> /shared/bin/python
    {{}} -> {OURS}""", json.loads))
def test_whose_python_runs_the_runner(launch, python):
    """The runner starts srun with its own Python, so the ranks' is the same until each becomes its stage. What is in a
    container is called so there only."""
    launch = LaunchConfig(**launch)
    assert outer_python(launch, contained=bool(launch.wrap)) == python


def test_a_site_that_does_not_count_gpus(requested):
    job = requested(request_gpus=False, extra={"gres": "nvme:1"})
    assert (job["ntasks_per_node"], job["gres"]) == (8, "nvme:1") and not any("gpus" in name for name in job)


@pytest.mark.parametrize("folder", ["r%u", "50%N of it"])
def test_the_log_is_where_its_path_says(launcher, folder):
    result = planned(launcher.accepted(f"--stage all --nodes 2 {DRY}", f"runs_dir={launcher.work}/{folder}"))
    path = f"{launcher.work}/{folder}/trial/launch/submitit".replace("%", "%%")
    assert [result[key]["output"] for key in ("train", "encode")] == [
        f"{path}/%j_0_log.out", f"{path}/%A_%a_0_log.out"]


@pytest.mark.parametrize("setup, status, message", table("""
    ["module() { return 1; }", module load nosuch] -> 1 -> (line 2, module load nosuch)
    ["true", nosuch --x] -> 127 -> (line 2, nosuch --x)
    [if true, then, cd /nosuch, fi] -> 1 -> (line 3, cd /nosuch)
    ["cat <<X\\na\\nX", ". $FILE"] -> 1 -> (line 4, . $FILE)
    [set -u, echo $NOSUCH] -> 1 -> (echo $NOSUCH)
    [set -e, "false"] -> 1 -> (line 2, false)
    [command -v nosuch || exit 7] -> 7 -> (exit 7)
    ["[ -f /nosuch ] && . /nosuch", nosuch || true, "! true", "f() { false; true; }", f] -> 0 -> ''
    [". $FILE || true", "if nosuch; then true; fi", "trap 'echo mine' EXIT"] -> 0 -> ''
    [set -euo pipefail, set -E] -> 0 -> ''
    [] -> 0 -> ''""", lambda text: yaml.safe_load(text.replace("\\\\n", "\\n")), int, lambda text: text.strip("'")))
def test_a_line_of_the_setup_that_fails_is_named(tmp_path, setup, status, message):
    """What fails inside of a sourced file is that file's business, but how it ends is not. Afterwards failures are the
    script's own."""
    (tmp_path / "file").write_text("false\necho on\n[ -n '' ]\n")
    script = tmp_path / "script"
    script.write_text("\n".join(["#!/bin/bash", *setup_lines(LaunchConfig(setup=setup)), "false", "echo ready"]))
    answer = subprocess.run(["/bin/bash", script], capture_output=True, text=True, env={"FILE": f"{tmp_path}/file"})
    assert answer.returncode == status and ("ready" in answer.stdout) == (not message), answer
    assert ("launch.setup failed" in answer.stderr) == bool(message)
    assert f"exit status {status} {message}." * bool(message) in answer.stderr


def test_a_setup_that_ends_the_job_fails():
    """With status 0 Slurm would start the next jobs."""
    script = "\n".join(setup_lines(LaunchConfig(setup=["exit 0"])))
    answer = subprocess.run(["/bin/bash", "-c", script], capture_output=True, text=True)
    assert answer.returncode == 1 and "launch.setup failed with exit status 0" in answer.stderr


def test_the_environment_holds_in_the_script_too_and_after_the_setup(requested):
    *setup, path, traps = requested(setup=["export TMPDIR=/x"], environment={"TMPDIR": "/local/a b"})["setup"]
    assert setup[-3:] == ["export TMPDIR=/x", "in_setup=; set +e", "export TMPDIR='/local/a b'"]
    assert path.startswith("export PYTHONPATH=") and traps.startswith("trap ")


# ---- containers

PYTHON = "/opt/venv/bin/python"
TWO_NODES = ("--stage encode,train --cluster slurm --dry-run launch.gpus_per_node=8 launch.train.nodes=2 "
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
