"""Submitting to Slurm: what submitit and sbatch get, the chain and its record, what is refused before, the copy of the
code, and what a submission makes of a rehearsal.

What the jobs do is tested on a real cluster in tests/slurm.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from drover.launch.run_status import continue_command, read_run
from drover.launch.slurm.chain import mark
from drover.launch.slurm.nodes import record_failure
from drover.launch.submit import show_plan
from drover.pipeline.contract.locks import lock
from drover.pipeline.contract.stages import STAGES
from drover.pipeline.core.files import read_json, write_text
from tests.launch.launcher import commit, copied, git, planned
from tests.launch.recorded_slurm import NO_CONTROLLER, queue_line
from tests.refusal import table

TRAIN_ON_FOUR_NODES = """#!/bin/bash

# Parameters
#SBATCH --account=physics
#SBATCH --chdir='{work}'
#SBATCH --comment=drover:FOLDER:train
#SBATCH --constraint=h100
#SBATCH --cpus-per-task=6
#SBATCH --dependency=afterok:103,singleton
#SBATCH --exclude='n[3-4]'
#SBATCH --gpus-per-node=8
#SBATCH --job-name=trial-train-FOLDER
#SBATCH --kill-on-invalid-dep=yes
#SBATCH --mem=500G
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --open-mode=append
#SBATCH --output='{work}/runs/trial/launch/submitit/%j_0_log.out'
#SBATCH --partition=gpu
#SBATCH --propagate=NONE
#SBATCH --qos=high
#SBATCH --requeue
#SBATCH --signal=USR2@180
#SBATCH --time=1500

# setup
module load cuda
export PYTHONPATH='{code}'${{PYTHONPATH:+:$PYTHONPATH}} PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1
trap stopped=yes TERM INT; trap : USR1 USR2

# command
export SUBMITIT_EXECUTOR=slurm
{python} -u -m submitit.core._submit '{work}/runs/trial/launch/submitit'


# teardown
status=$?
[ $status != 137 ] || [ ${{stopped:-}} ] || {{ {python} -m drover.launch.job.task '{work}/runs/trial' \
train CHAIN; for pause in 1 5 20 60 0; do scontrol requeue ${{SLURM_ARRAY_JOB_ID:+${{SLURM_ARRAY_JOB_ID}}_}}\
${{SLURM_ARRAY_TASK_ID:-$SLURM_JOB_ID}} && break; sleep $pause; done; }}
exit $status"""
FOUR_NODES = """--stage all --nodes 4 --gpus-per-node 8 launch.cpus=6 launch.account=physics
launch.mem=500G launch.time=600 launch.train.time=1-01:00:00 launch.train.partition=gpu
'launch.train.extra={qos: high, constraint: h100}' launch.exclude=n[3-4] launch.encode.partition=cpu
launch.signal_s=180 'launch.setup=[module load cuda]'"""


def option(script, name):
    """The value of an #SBATCH option; "" for one without a value, None where it is absent."""
    result = re.search(rf"^#SBATCH --{name}(?:=(.*))?$", script, re.MULTILINE)
    return None if result is None else (result[1] or "").strip("'")


def test_the_script_of_training_on_four_nodes(slurm):
    slurm.accepted(FOUR_NODES)
    for path in slurm.queue.iterdir():
        subprocess.run(["/bin/bash", "-n", path], check=True)
        assert len(path.read_text().splitlines()) < 50, "a person can read it"
    train = next(job for job in slurm.chain.jobs if job.stage == "train")
    script = slurm.run / f"launch/submitit/{train.id}_submission.sh"
    assert script.read_text() == (slurm.queue / train.id).read_text()
    code = re.search(r"PYTHONPATH='(.+?)'", script.read_text())[1]
    assert Path(code).parent == slurm.run / "code"
    plain = re.sub(r"[0-9]{8}-[0-9]{6}-[0-9a-f]{4}", "CHAIN", script.read_text())
    setup = re.search("(?s)\nin_setup=[^\n].*\nmodule load cuda\nin_setup=; set [+]e\n", plain)[0]  # see test_options
    plain = plain.replace(setup, "\nmodule load cuda\n")
    plain = plain.replace(mark(slurm.run), "FOLDER")
    assert plain == TRAIN_ON_FOUR_NODES.format(work=slurm.work, code=code, python=sys.executable)


def test_the_plan_for_four_nodes(launcher):
    shown = launcher.accepted(f"{FOUR_NODES} --dry-run")
    assert not launcher.run.exists(), "a dry run writes nothing"
    rows = [" ".join(line.split()) for line in shown.splitlines()]
    assert "shard absent 2 processes 1, 4 elements 6 cores, 500G 10 h 00 m" in rows
    assert "train absent 32 ranks x 6 threads 4 48 cores, 8 GPUs, 500G 25 h 00 m gpu, high, h100 encode" in rows


def test_arrays_and_sites_without_requeue(launcher):
    shown = launcher.accepted("""--stage all --nodes 2 --dry-run launch.requeue=false
        launch.shard.array=1 launch.encode.array=5 launch.encode.at_once=2 train.micro_batch=1
        'launch.extra={comment: night}' launch.qos=high launch.constraint=h100""")
    result = planned(shown)
    assert [(key, str(job.get("dependency"))) for key, job in result.items()] == table("""
        shard -> None
        tokenizer -> afterok:ID_OF_shard
        encode -> afterok:ID_OF_tokenizer
        train -> afterok:ID_OF_encode,singleton
        convert -> afterok:ID_OF_train
        evaluate -> afterok:ID_OF_convert
        report -> afterok:ID_OF_evaluate""")
    name = result["train"]["job_name"]
    other = planned(launcher.accepted("--stage all --cluster slurm --dry-run runs_dir=other"))
    assert name.startswith("trial-train-") and other["train"]["job_name"] not in (name, "trial-train"), \
        "singleton goes by the name: a run of another folder is not waited for"
    assert result["encode"]["array_parallelism"] == 2
    assert all(job["no-requeue"] is True and "requeue" not in job and not any("requeue" in line for line in
               job["teardown"]) and re.fullmatch(r"drover:[0-9a-f-]+:[a-z0-9-]+ night", job["comment"])
               and [job["qos"], job["constraint"]] == ["high", "h100"] for job in result.values())


def test_submission_chains_what_is_not_done(slurm):
    slurm.done("shard")
    assert "nothing to submit" in slurm.accepted("--stage shard") and not list(slurm.queue.iterdir())
    shown = slurm.accepted("--stage all launch.encode.array=2 train.steps=40 --force")
    chain = slurm.chain
    assert [(job.stage, job.id, str(job.elements), *job.dependencies) for job in chain.jobs[1:4]] == table("""
        tokenizer -> 102 -> None -> 101
        encode -> 103 -> (0, 1) -> 102
        train -> 104 -> None -> 103""")
    assert "encode    job 103 (2 elements) after 102" in shown and "`drover status " in shown
    assert (slurm.run / "launch/submitit").stat().st_mode & 0o777 == 0o700
    spec = slurm.task("104").spec
    assert spec.command[1:3] == ("-m", "drover.pipeline.train") and chain.config in spec.command
    assert "steps: 40" in Path(chain.config).read_text() and slurm.run in Path(chain.config).parents
    # What is to continue is not forced again.
    assert "the same command without --force submits what is left" in shown
    assert "--force" in chain.command and "--force" not in continue_command(read_run(slurm.run))
    assert spec.command[spec.command.index("--force-id") + 1] == chain.id and "--force" not in spec.command


def test_a_run_is_queued_once(slurm):
    slurm.accepted("--stage all")
    assert [job.stage for job in slurm.chain.jobs] == list(STAGES), "every stage has a job"
    slurm.programs.say("squeue", error=NO_CONTROLLER, status=1)
    assert "squeue does not answer" in slurm.accepted("--stage all")
    slurm.programs.say("squeue", queue_line("104", "RUNNING", name="trial-train",
                                            comment=f"drover:{mark(slurm.run)}:train"))
    again = slurm.refused("--stage all")
    assert "in the queue already: 104 (trial-train)" in again, "of an earlier submission"
    shown = slurm.call("config.yaml", program=show_plan)
    assert shown.returncode == 0 and "in the queue already: 104" in shown.stdout and "absent" in shown.stdout
    slurm.programs.say("squeue", queue_line("999", "RUNNING", name="trial-train"))
    slurm.accepted("--stage all")


def test_two_submissions_of_a_run_do_not_meet(slurm):
    slurm.run.mkdir(parents=True)
    other = lock(slurm.run, "submission")
    assert "The submission of " in slurm.refused("--stage all") and not list(slurm.queue.iterdir())
    other.close()
    slurm.accepted("--stage all")


def test_the_shells_own_slurm_variables_reach_no_job(slurm):
    shown = slurm.accepted("--stage shard", SBATCH_EXPORT="NONE", SBATCH_TIMELIMIT="1", SLURM_JOB_ID="7",
                           SLURM_NNODES="4", SLURM_CONF="/etc/slurm.conf")
    assert "SBATCH_EXPORT, SBATCH_TIMELIMIT, SLURM_JOB_ID, SLURM_NNODES of your shell are not passed on" in shown
    assert (slurm.queue / "101.environment").read_text().split() == ["SLURM_CONF=/etc/slurm.conf"]


def test_a_refused_submission_says_what_is_queued(slurm):
    message = slurm.refused("--stage all", REFUSED="103")
    assert "trial-encode: invalid partition. Change what it requests (`drover explain launch`)" in message
    assert f"Queued before it: 101 102; `drover cancel {slurm.run}` removes all jobs of the run" in message
    assert [job.id for job in slurm.chain.jobs] == ["101", "102"], "what is queued can be cancelled"
    assert slurm.chain.refused in message
    assert "Queued before it: nothing; " in slurm.refused("--stage all name=other", REFUSED="103")


def test_nodes_that_failed_twice_are_left_out(slurm):
    for node in ("n3", "n7"):
        for job in ("1.0", "1.1"):
            record_failure(slurm.run, node, job, "went down")
    (slurm.run / "launch/stop").touch()
    shown = slurm.accepted("--stage all")
    assert "excluded  n7: failed twice within a day" in shown
    assert option((slurm.queue / "104").read_text(), "exclude") == "n7"
    assert not (slurm.run / "launch/stop").exists(), "it was meant for what ran then"


def test_all_that_cannot_work_is_told_at_once(slurm):
    message = slurm.refused("""--stage all --nodes 4 launch.train.time=2 launch.secrets=[NO_SUCH_TOKEN]
        launch.environment.HF_TOKEN=hf_abc""")
    assert not list(slurm.queue.iterdir()) and not (slurm.run / "code").exists()
    for part in ("launch.time of train is not longer than launch.signal_s=120 s",
                 "your shell has no such variable",
                 "contains what looks like a secret (HF_TOKEN)"):
        assert part in message, part
    assert "hf_abc" not in message


# ---- the copy of the code


@pytest.fixture
def checkout(tmp_path):
    """A small repository: a commit, then a change and a new file that is not in it."""
    folder = tmp_path / "checkout"
    for name, text in {"launch/a.py": "A = 1\n", "pipeline/deep/b.py": "B = 1\n", "drover/__init__.py": "D = 1\n",
                       "tests/c.py": "no job needs it\n", ".gitignore": "__pycache__/\nruns/\n"}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    commit(folder)
    return folder


def files(folder):
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*")
            if path.is_file() and path.name != "snapshot.json"}


def test_a_checkout_is_copied_once_and_again_with_what_was_changed(checkout, tmp_path):
    copy = copied(tmp_path / "run", checkout)
    first = {"drover/__init__.py": "D = 1\n", "drover/launch/a.py": "A = 1\n", "drover/pipeline/deep/b.py": "B = 1\n"}
    assert files(copy) == first
    head = git(checkout, "rev-parse", "HEAD").strip()
    assert read_json(copy / "snapshot.json") == {"commit": head, "changed": False}
    (copy / "drover/launch/a.py").unlink()  # a copy that was never finished, or is being removed
    assert copied(tmp_path / "run", checkout) == copy and files(copy) == first
    (checkout / "launch/a.py").write_text("A = 2\n")
    (checkout / "pipeline/new.py").write_text("N = 1\n")
    other = copied(tmp_path / "run", checkout)
    assert files(copy) == first, "what is edited later does not reach it"
    assert files(other) == {**first, "drover/launch/a.py": "A = 2\n", "drover/pipeline/new.py": "N = 1\n"}
    assert read_json(other / "snapshot.json")["changed"] is True


def test_an_installed_package_inside_of_another_repository(checkout, tmp_path):
    """Or a copy: there the folder `drover` holds the files themselves."""
    before = files(copied(tmp_path / "run", checkout))
    for name, text in before.items():
        write_text(checkout / "runs/copy" / name, text)
    copy = copied(tmp_path / "other", checkout / "runs/copy/drover")
    assert copy.name.startswith("unversioned-") and files(copy) == before
    assert read_json(copy / "snapshot.json")["commit"] == ""
