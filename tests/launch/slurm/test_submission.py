"""Submitting to Slurm: what submitit and sbatch get, the chain and its record, what is refused before.

What the jobs do is tested on a real cluster in tests/slurm.
"""

import errno
import fcntl
import re
import subprocess
import sys
from pathlib import Path

import pytest

from drover.launch.job.host import JobSpec
from drover.launch.run_status.run_files import read_run
from drover.launch.run_status.run_status import continue_command
from drover.launch.slurm.nodes import record_failure
from drover.pipeline.contract.locks import lock
from drover.pipeline.contract.stages import STAGES
from tests.launch.launcher import planned
from tests.launch.recorded_slurm import NO_CONTROLLER, queue_line
from tests.refusal import table

TRAIN_ON_FOUR_NODES = """#!/bin/bash

# Parameters
#SBATCH --account=physics
#SBATCH --chdir='{work}'
#SBATCH --comment=drover:CHAIN:train
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
[ $status != 137 ] || [ ${{stopped:-}} ] || {{ {python} -m drover.launch.job.task '{work}/runs/trial/launch/jobs/\
CHAIN-train.json'; for pause in 1 5 20 60 0; do scontrol requeue ${{SLURM_ARRAY_JOB_ID:+${{SLURM_ARRAY_JOB_ID}}_}}\
${{SLURM_ARRAY_TASK_ID:-$SLURM_JOB_ID}} && break; sleep $pause; done; }}
exit $status"""
FOUR_NODES = """--stage all --nodes 4 --gpus-per-node 8 --no-rehearse launch.cpus=6 launch.account=physics
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
    plain = re.sub(r"(name=trial-train-)[0-9a-f]{6}$", r"\1FOLDER", plain, flags=re.MULTILINE)
    assert plain == TRAIN_ON_FOUR_NODES.format(work=slurm.work, code=code, python=sys.executable)


def test_the_plan_for_four_nodes(launcher):
    shown = launcher.accepted(f"{FOUR_NODES} --dry-run")
    assert not launcher.run.exists(), "a dry run writes nothing"
    result = planned(shown)
    requested = ("dependency", "array_parallelism", "gpus_per_node", "nodes", "ntasks_per_node")
    assert [(key, *(str(job.get(name)) for name in requested)) for key, job in result.items()] == table("""
        shard -> None -> 4 -> None -> 1 -> 1
        tokenizer -> afterok:ID_OF_shard -> None -> None -> 1 -> 1
        encode -> afterok:ID_OF_tokenizer -> 4 -> None -> 1 -> 1
        train -> afterok:ID_OF_encode,singleton -> None -> 8 -> 4 -> 8
        convert -> afterok:ID_OF_train -> None -> None -> 1 -> 1
        evaluate -> afterok:ID_OF_convert -> None -> 8 -> 1 -> 8
        report -> afterok:ID_OF_evaluate -> None -> None -> 1 -> 1""")
    rows = [" ".join(line.split()) for line in shown.splitlines()]
    assert "shard absent 1, 4 elements 2 processes 6 500G 10 h 00 m -" in rows
    assert "train absent 4 32 ranks x 6 threads 48 8 500G 25 h 00 m gpu, high, h100 encode" in rows


def test_links_arrays_and_sites_without_requeue(launcher):
    shown = launcher.accepted("""--stage all --nodes 2 --dry-run launch.train.links=3 launch.requeue=false
        launch.shard.array=1 launch.encode.links=2 launch.encode.array=5 launch.encode.at_once=2 train.micro_batch=1
        'launch.extra={comment: night}' launch.qos=high launch.constraint=h100""")
    result = planned(shown)
    assert [(key, str(job.get("dependency"))) for key, job in result.items()] == table("""
        shard -> None
        tokenizer -> afterok:ID_OF_shard
        encode-1 -> afterok:ID_OF_tokenizer
        encode -> afterok:ID_OF_tokenizer,afterany:ID_OF_encode-1
        train-1 -> afterok:ID_OF_encode,singleton
        train-2 -> afterok:ID_OF_encode,afterany:ID_OF_train-1,singleton
        train -> afterok:ID_OF_encode,afterany:ID_OF_train-2,singleton
        convert -> afterok:ID_OF_train
        evaluate -> afterok:ID_OF_convert
        report -> afterok:ID_OF_evaluate""")
    name, = {result[key]["job_name"] for key in ("train-1", "train-2", "train")}
    other = planned(launcher.accepted("--stage all --cluster slurm --dry-run runs_dir=other"))
    assert name.startswith("trial-train-") and other["train"]["job_name"] not in (name, "trial-train"), \
        "singleton goes by the name: a run of another folder is not waited for"
    assert result["encode-1"]["array_parallelism"] == result["encode"]["array_parallelism"] == 2
    assert all(job["no-requeue"] is True and "requeue" not in job and not any("requeue" in line for line in
               job["teardown"]) and re.fullmatch(r"drover:[0-9a-f-]+:[a-z0-9-]+ night", job["comment"])
               and [job["qos"], job["constraint"]] == ["high", "h100"] for job in result.values())
    assert "link 2 of 3" in shown


def test_submission_chains_what_is_not_done(slurm):
    slurm.done("shard")
    assert "nothing to submit" in slurm.accepted("--stage shard") and not list(slurm.queue.iterdir())
    shown = slurm.accepted("--stage all launch.encode.array=2 train.steps=40 --force")
    chain = slurm.chain
    assert [(job.stage, job.id, str(job.elements), *job.dependencies) for job in chain.jobs[1:5]] == table("""
        tokenizer -> 102 -> None -> 101
        encode -> 103 -> (0, 1) -> 102
        train -> 104 -> None -> 103
        convert -> 105 -> None -> 104""")
    assert option((slurm.queue / "104").read_text(), "dependency") == "afterok:103,singleton"
    assert "encode    job 103 (2 elements) after 102" in shown and "`drover status " in shown
    folder = slurm.run / "launch/submitit"
    assert {path.name for path in folder.glob("*.pkl")} == {f"{id}_submitted.pkl" for id in (
        "101", "102", "103_0", "103_1", *range(104, 108))} and folder.stat().st_mode & 0o777 == 0o700
    spec = JobSpec.load(slurm.run / f"launch/jobs/{chain.id}-train.json")
    assert (spec.stage, spec.ranks, spec.nodes, spec.chain, spec.run) == ("train", 2, 1, chain.id, str(slurm.run))
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
    slurm.programs.queue("104 RUNNING")
    again = slurm.refused("--stage all")
    assert "in the queue already: 104 (trial-train)" in again, "of an earlier submission"
    slurm.programs.say("squeue", queue_line("999", "RUNNING", name="trial-train"))
    slurm.accepted("--stage all")


def test_two_submissions_of_a_run_do_not_meet(slurm):
    slurm.run.mkdir(parents=True)
    other = lock(slurm.run, "submission")
    assert "the submission of " in slurm.refused("--stage all") and not list(slurm.queue.iterdir())
    other.close()
    slurm.accepted("--stage all")


def test_the_shells_own_slurm_variables_reach_no_job(slurm):
    shown = slurm.accepted("--stage shard", SBATCH_EXPORT="NONE", SBATCH_TIMELIMIT="1", SLURM_JOB_ID="7",
                           SLURM_NNODES="4", SLURM_CONF="/etc/slurm.conf")
    assert "SBATCH_EXPORT, SBATCH_TIMELIMIT, SLURM_JOB_ID, SLURM_NNODES of your shell are not passed on" in shown
    assert (slurm.queue / "101.environment").read_text().split() == ["SLURM_CONF=/etc/slurm.conf"]


SITE = """\
debug*|4|4|16000|(null)|1:00:00|1-2
long|4|64|16000|(null)|infinite|1-infinite
odd line
odd|1|64+||none||
big|2|64|256000|gpu:a:6(S:0-1),gpu:b:2,x:1|infinite|1-infinite"""


@pytest.mark.parametrize("words, message", table("""
    launch.time=60 -> train, evaluate: requests 1 node with 8 cores, 0 GPUs each, but the partition has 4 with 4 \
cores, 0 GPUs: change launch.cpus
    --nodes 3 launch.partition=big launch.gpus_per_node=2 train.micro_batch=1 train.batch_tokens=12288 --no-rehearse \
-> requests 3 nodes with 8 cores, 2 GPUs each
    launch.gpus_per_node=2 launch.time=60 launch.cpus=1 --no-rehearse -> train, evaluate: requests 1 node with 2 \
cores, 2 GPUs | has 4 with 4 cores, 0 GPUs: | launch.request_gpus=false requests no GPUs
    --nodes 4 launch.time=60 launch.cpus=2 -> train: requests 4 nodes, but the partition debug (without launch.qos) \
allows 2: request fewer
    launch.time=60 launch.convert.time=61 -> convert: requests 61 min, but the partition debug (without launch.qos) \
allows 60: request less"""))
def test_what_no_partition_takes_is_told_before_anything_queues(slurm, words, message):
    """Slurm would keep such jobs for ever. Of training's it would say so only once all before it is done."""
    slurm.programs.say("sinfo", SITE)
    complaint = slurm.refused(f"--stage all {words}")
    assert all(part in complaint for part in message.split(" | ")) and not list(slurm.queue.iterdir()), complaint


@pytest.mark.parametrize("words", [
    "launch.gpus_per_node=4 launch.request_gpus=false launch.cpus=1 --no-rehearse",
    "launch.cpus=2", "--nodes 4 launch.partition=debug,long", "--nodes 4 launch.qos=high launch.cpus=2"])
def test_what_a_partition_takes_is_queued(slurm, words):
    """A quality of service may lift a partition's limits."""
    slurm.programs.say("sinfo", SITE)
    slurm.accepted(f"--stage all launch.time=60 {words}")


def test_a_refused_submission_says_what_is_queued(slurm):
    message = slurm.refused("--stage all", REFUSED="103")
    assert "trial-encode: invalid partition. What to do: set launch.partition; `sinfo` shows those that" in message
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
    assert "not excluded  n3: failed twice within a day too, but of 1 nodes at most 1 is" in shown
    assert option((slurm.queue / "104").read_text(), "exclude") == "n7"
    assert not (slurm.run / "launch/stop").exists(), "it was meant for what ran then"


def test_all_that_the_site_forbids_is_told_at_once(slurm):
    slurm.programs.say("sinfo", SITE)
    message = slurm.refused("""--stage all --nodes 4 launch.cpus=1 launch.train.time=4 launch.secrets=[NO_SUCH_TOKEN]
        launch.gpu_memory_gb=0.000001 launch.environment.HF_TOKEN=hf_abc""")
    assert not list(slurm.queue.iterdir()) and not (slurm.run / "code").exists()
    for part in ("train: requests 4 nodes, but the partition debug", "requests 240 min, but the partition debug",
                 "a GPU has 1 kB (launch.gpu_memory_gb)", "your shell has no such variable",
                 "contains what looks like a secret (HF_TOKEN)"):
        assert part in message, part
    assert "hf_abc" not in message
    assert "are free at" in slurm.refused(
        "--stage all train.checkpoint.permanent_every=1 train.steps=200000000 train.warmup_steps=3")
    slurm.accepted("--stage all launch.cpus=1 launch.time=60 launch.gpu_memory_gb=1")


def test_a_file_system_without_locks(slurm, monkeypatch):
    def none(*_, **more):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", none)
    slurm.accepted("--stage all launch.encode.array=2")
    assert len(slurm.chain.jobs) == 7
