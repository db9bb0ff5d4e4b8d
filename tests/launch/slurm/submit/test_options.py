"""What a job asks of sbatch: the user's own options over ours, once; whose Python runs what."""

import json
import re
import shlex
import subprocess
import sys

import pytest
import yaml

from tests.launch.slurm.submit.test_sbatch import scripts
from tests.refusal import table

DRY = "--cluster slurm --dry-run --no-rehearse"
OURS = shlex.quote(sys.executable)


@pytest.fixture
def script(launcher):
    """Gives a train job's script, on two nodes with 8 GPUs each."""
    def made(**launch):
        settings = {"gpus_per_node": 8, "train.nodes": 2, **launch}
        text = scripts(launcher.accepted(f"--stage train {DRY}", *(
            f"launch.{name}={json.dumps(value)}" for name, value in settings.items())))["train"]
        subprocess.run(["/bin/bash", "-n"], input=text, text=True, check=True)
        return text
    launcher.done("shard", "tokenizer", "encode")
    return made


@pytest.mark.parametrize("name, value", table("""
    gres -> gpu:h100:8
    gpus_per_node -> h100:8
    --gpus-per-node -> h100:8
    gpus -> 16
    gpus-per-task -> h100:1
    gres -> nvme:1,gpu:8""", str, yaml.safe_load))
def test_gpus_are_asked_for_once(script, name, value):
    asked, = re.findall("#SBATCH --((?:gres|gpus).*)", script(extra={name: value}))
    assert asked.endswith(f"={value}")


def test_other_options_and_the_type_of_the_gpus(script):
    text = script(gpu_type="h100", extra={"gres": "nvme:1", "exclusive": True, "overcommit": False})
    assert re.findall("#SBATCH --((?:gres|gpus|exclusive|overcommit).*)", text) == [
        "exclusive", "gpus-per-node=h100:8", "gres=nvme:1"]


@pytest.mark.parametrize("extra, told", table("""
    {"gres": "gpu:4"} -> train: launch.extra requests 4 GPUs a node (gres), but the job has 8
    {"gpus": "h100:8"} -> requests 4 GPUs a node (gpus)
    {"gpus-per-task": 2} -> requests 16 GPUs a node
    {"partition": "big"} -> launch.extra has partition, which the launcher sets itself. Use launch.partition.
    {"export": "NONE"} -> Use launch.environment and launch.secrets.
    {"time": 9, "wait": true} -> extra has wait, which the launcher sets itself. Leave it out.
    {"account": "a"} -> launch.extra has account. Set launch.account; for a single stage, set it in
    {"c": "9"} -> launch.extra has c; write the long name of sbatch's option -c (man sbatch).
    {"test-only": true} -> Use --dry-run
    {"container-image": "x"} -> Use launch.container
    {"gres": "gpu:h100:8"} -> train: launch.gpu_type and gres in launch.extra both choose the GPUs
    {"mem-per-cpu": "4G"} -> train: launch.mem and mem-per-cpu in launch.extra both set the memory"""))
def test_options_that_contradict_the_job_are_refused(launcher, extra, told):
    said = launcher.refused(f"--stage encode,train {DRY} train.micro_batch=1 launch.gpus_per_node=8 launch.mem=64G "
                            f"launch.train.nodes=2 launch.gpu_type=h100", f"launch.extra={extra}")
    assert told in said


@pytest.mark.parametrize("launch, python", table(f"""
    {{"python": "/shared/my venv/bin/python"}} -> '/shared/my venv/bin/python'
    {{"python": "python3", "wrap": ["apptainer", "exec", "x.sif"]}} -> {OURS}
    {{"python": "python3", "wrap": ["x"], "runner_python": "/shared/bin/python"}} -> /shared/bin/python
    {{"runner_python": "/shared/bin/python"}} -> /shared/bin/python
    {{}} -> {OURS}""", json.loads))
def test_whose_python_runs_the_runner(script, launch, python):
    """The runner starts srun with its own Python, so the ranks' is the same until each becomes its stage. What is in a
    container is called so there only."""
    assert f"\n{python} -m drover.launch.slurm.job.runner " in script(**launch)


def test_the_environment_holds_in_the_script_too_and_after_the_setup(script):
    """The script copies the code to TMPDIR before any rank starts."""
    text = script(setup=["export TMPDIR=/x"], environment={"TMPDIR": "/local/a b"})
    places = [text.index(part) for part in ("\ntrap", "\nexport TMPDIR=/x\n", "\nexport TMPDIR='/local/a b'\ncheck=")]
    assert places == sorted(places)
