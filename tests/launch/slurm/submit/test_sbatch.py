"""Submitting to Slurm: the text that sbatch gets, the chain and its record, what is refused before.

What the jobs do is tested in tests/launch/slurm/test_by_hand.py, and on a real cluster in tests/slurm.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from launch.run_status.run_files import read_run
from launch.run_status.run_status import go_on
from launch.slurm.chain import Chain, read_chain, read_chains
from launch.slurm.evaluations import submit_apart
from launch.slurm.jobspec import JobSpec
from launch.slurm.nodes import add_strike
from launch.slurm.submit.sbatch import _ranges
from pipeline.contract.stages import STAGES
from pipeline.files import read_json
from tests.launch.launcher import Launcher
from tests.launch.recorded_slurm import queue_line

TRAIN_ON_FOUR_NODES = """#!/bin/bash

# Parameters
#SBATCH --account=physics
#SBATCH --chdir='{work}'
#SBATCH --constraint=h100
#SBATCH --cpus-per-task=6
#SBATCH --dependency=afterok:ID_OF_encode,singleton
#SBATCH --error='{work}/runs/trial/logs/slurm/%j.log'
#SBATCH --exclude='n[3-4]'
#SBATCH --gpus-per-node=8
#SBATCH --job-name=trial-train
#SBATCH --kill-on-invalid-dep=yes
#SBATCH --mem=500G
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --open-mode=append
#SBATCH --output='{work}/runs/trial/logs/slurm/%j.log'
#SBATCH --partition=gpu
#SBATCH --qos=high
#SBATCH --requeue
#SBATCH --signal=USR2@180
#SBATCH --time=1500

# setup
trap : TERM INT
module load cuda
echo 'SHA256  {code_}/launch/slurm/trust.py' | sha256sum --check --status || {{ echo \
'refused: {code_}/launch/slurm/trust.py is not what was submitted, or gone; submit the same command again'; exit 1; }}
{python} -I '{code_}/launch/slurm/trust.py' '{work}/runs/trial/launch/jobs/CHAIN-train.json' SHA256 || exit 1
export PYTHONPATH={code}${{PYTHONPATH:+:$PYTHONPATH}}
export PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1

# command
export SUBMITIT_EXECUTOR=slurm
{python} -u -m submitit.core._submit '{work}/runs/trial/logs/slurm'


# teardown
code=$?; [ $code -ne 137 ] || {{ touch '{work}/runs/trial/launch'/killed.$SLURM_JOB_ID.${{SLURM_RESTART_COUNT:-0}}; \
scontrol requeue $SLURM_JOB_ID; }}; exit $code
"""
FOUR_NODES = ("--nodes", "4", "--gpus-per-node", "8", "launch.cpus=6", "launch.account=physics", "launch.mem=500G",
              "launch.time=600", "launch.train.time=1-01:00:00", "launch.train.partition=gpu", "launch.train.qos=high",
              "launch.train.constraint=h100", "launch.train.exclude=n[3-4]", "launch.encode.partition=cpu",
              "launch.signal_s=180", "launch.setup=[module load cuda]", "train.micro_batch=1", "--no-rehearse")


def chain_of(slurm: Launcher) -> Chain:
    """The newest submission."""
    chain = read_chain(slurm.run)
    assert chain is not None
    return chain


def scripts(text: str) -> dict[str, str]:
    """The scripts of a dry run by the job's key."""
    found = {}
    for part in text.split("# ---- ")[1:]:
        found[part.partition(":")[0]] = part[part.index("#!/bin/bash"):].rstrip("\n") + "\n"
    return found


def option(script: str, name: str) -> str | None:
    """The value of an #SBATCH option; "" for one without a value, None where it is absent."""
    found = re.search(rf"^#SBATCH --{name}(?:=(.*))?$", script, re.MULTILINE)
    return None if found is None else (found[1] or "").strip("'")


def test_the_script_of_training_on_four_nodes(launcher):
    result = launcher.submit("--stage", "all", "--dry-run", *FOUR_NODES)
    assert result.returncode == 0, result.stderr
    assert not launcher.run.exists(), "a dry run writes nothing"
    found = scripts(result.stdout)
    code = re.search(r"export PYTHONPATH='?([^$']+)'?\$", found["train"])[1]
    assert Path(code).parent == launcher.run / "code"
    quoted = f"'{code}'" if f"'{code}'" in found["train"] else code
    plain = re.sub(r"[0-9]{8}-[0-9]{6}-[0-9a-f]{4}", "CHAIN", re.sub(r"\b[0-9a-f]{64}\b", "SHA256", found["train"]))
    assert plain == TRAIN_ON_FOUR_NODES.format(work=launcher.work, code=quoted, code_=code, python=sys.executable)
    for text in found.values():
        subprocess.run(["/bin/bash", "-n"], input=text, text=True, check=True)

    phases = [f"shard-{phase}" for phase in STAGES["shard"].phases]
    assert list(found) == [*phases, "shard", "tokenizer", "encode-parts", "encode", "train", "convert", "evaluate",
                           "report"] and len(phases) > 1
    waits = {key: option(text, "dependency") for key, text in found.items()}
    assert waits == {
        "shard-read": None, **{later: f"afterok:ID_OF_{phase}" for phase, later in itertools.pairwise(
            [*phases, "shard"])}, "tokenizer": "afterok:ID_OF_shard",
        "encode-parts": "afterok:ID_OF_tokenizer", "encode": "afterok:ID_OF_encode-parts",
        "train": "afterok:ID_OF_encode,singleton", "convert": "afterok:ID_OF_train",
        "evaluate": "afterok:ID_OF_convert", "report": "afterok:ID_OF_evaluate"}
    for key, text in found.items():
        assert (option(text, "kill-on-invalid-dep") == "yes") == (key != "shard-read"), key
        assert option(text, "array") == ("0-3" if key in (*phases, "encode-parts") else None)
        assert option(text, "time") == ("1500" if key == "train" else "600")
        assert option(text, "partition") == {"train": "gpu", "encode": "cpu", "encode-parts": "cpu"}.get(key)
        assert option(text, "gpus-per-node") == ("8" if key in ("train", "evaluate") else None)
        assert option(text, "nodes") == ("4" if key == "train" else "1")
        assert option(text, "ntasks-per-node") == ("8" if key in ("train", "evaluate") else "1")
    assert option(found["encode-parts"], "output") == f"{launcher.run}/logs/slurm/%A_%a.log"

    rows = {line.split()[0]: line for line in result.stdout.splitlines() if line.strip()}
    assert re.fullmatch(r"shard-read +to do +4 of 4 parts +2 processes +6 +500G +10 h 00 m +-", rows["shard-read"])
    assert re.fullmatch(r"shard-write +.*4 of 4 parts .* shard-\w+", rows["shard-write"])
    assert re.fullmatch(r"train +waiting +4 +32 ranks x 6 threads +48 +8 +500G +25 h 00 m +gpu, high, h100 +encode",
                        rows["train"]), rows["train"]
    assert "memory" in result.stdout and "a rank for weights, gradients and moments" in result.stdout


def test_links_arrays_and_sites_without_requeue(launcher):
    answer = launcher.submit(
        "--stage", "all", "--nodes", "2", "--dry-run", "launch.train.links=3", "launch.requeue=false",
        "launch.shard.array=1", "launch.encode.array=5", "launch.encode.at_once=2", "train.micro_batch=1",
        "launch.extra={comment: night}")
    found = scripts(answer.stdout)
    assert list(found) == ["shard", "tokenizer", "encode-parts", "encode", "train-1", "train-2", "train", "convert",
                           "evaluate", "report"]
    for key in ("train-1", "train-2", "train"):
        assert option(found[key], "dependency") == "afterok:ID_OF_encode,singleton"
        assert option(found[key], "job-name") == "trial-train"
    assert option(found["convert"], "dependency") == "afterok:ID_OF_train"
    assert option(found["encode-parts"], "array") == "0-4%2"
    assert all(option(text, "no-requeue") == "" and option(text, "requeue") is None and "teardown" not in text
               and option(text, "comment") == "night" for text in found.values())
    assert "link 2 of 3" in answer.stdout
    assert [_ranges(elements) for elements in ((0,), (0, 1, 2), (1, 3, 4, 5, 9))] == ["0", "0-2", "1,3-5,9"]


def test_submission_chains_what_is_not_done(slurm):
    slurm.done("shard")
    result = slurm.submit("--stage", "all", "launch.encode.array=2", "train.steps=40")
    assert result.returncode == 0, result.stderr
    chain = chain_of(slurm)
    assert [(job.stage, job.kind, job.id, job.elements, job.dependencies) for job in chain.jobs] == [
        ("tokenizer", "job", "101", None, ()), ("encode", "array", "102", (0, 1), ("101",)),
        ("encode", "finalise", "103", None, ("102",)), ("train", "job", "104", None, ("103",)),
        ("convert", "job", "105", None, ("104",)), ("evaluate", "job", "106", None, ("105",)),
        ("report", "job", "107", None, ("106",))]
    assert option((slurm.queue / "104").read_text(), "dependency") == "afterok:103,singleton"
    assert "encode    job 103 (finalise) after 102" in result.stdout and "launch/status.py" in result.stdout
    assert "encode    job 102 (array encode) after 101" in result.stdout
    assert chain.command[-4:] == ("--stage", "all", "launch.encode.array=2", "train.steps=40")
    pickles = {path.name for path in (slurm.run / "logs/slurm").glob("*.pkl")}
    assert {"102_0_submitted.pkl", "102_1_submitted.pkl", "104_submitted.pkl"} <= pickles
    spec = JobSpec.load(Path(chain.jobs[3].spec))
    assert (spec.stage, spec.ranks, spec.nodes, spec.chain, spec.run) == ("train", 2, 1, chain.id, str(slurm.run))
    assert spec.command[1:3] == ("-m", "pipeline.train") and chain.config in spec.command
    assert [JobSpec.load(Path(job.spec)).warned for job in chain.jobs[:4]] == [True, True, True, False]
    assert JobSpec.load(Path(chain.jobs[1].spec)).parts == 2 and not spec.parts
    # What is edited later does not reach the jobs.
    (slurm.work / "config.yaml").write_text("name: trial\ntrain: {steps: 7}\n")
    (slurm.checkout / "launch/slurm/trust.py").write_text("broken")
    assert "steps: 40" in Path(chain.config).read_text()
    assert "broken" not in (Path(chain.code) / "launch/slurm/trust.py").read_text()


def test_a_run_is_queued_once(slurm):
    assert slurm.submit("--stage", "all").returncode == 0
    assert [job.stage for job in chain_of(slurm).jobs] == list(STAGES), "every stage has a job"
    again = slurm.submit("--stage", "all", QUEUED=queue_line("103", "RUNNING"))
    assert again.returncode == 2 and "in the queue already: 103 (trial-encode)" in again.stderr
    assert "--cancel" in again.stderr and len(list(slurm.queue.iterdir())) == 7
    silent = slurm.submit("--stage", "all", SILENT="1")
    assert silent.returncode == 0 and "does not say" in silent.stdout
    assert [len(chain.jobs) for chain in read_chains(slurm.run)] == [7, 7]
    again = slurm.submit("--stage", "all", QUEUED=queue_line("104", "RUNNING"))
    assert again.returncode == 2 and "in the queue already: 104" in again.stderr, "of an earlier submission"
    namesake = slurm.submit("--stage", "all", QUEUED=queue_line("999", "RUNNING", name="trial-train"))
    assert namesake.returncode == 0 and "other jobs of the same names are in the queue: 999" in namesake.stdout


def test_what_is_to_go_on_is_not_forced_again(slurm):
    slurm.done("shard")
    result = slurm.submit("--stage", "all", "--force")
    assert result.returncode == 0 and "the same command without --force submits what is left" in result.stdout
    chain = chain_of(slurm)
    assert "--force" in chain.command and "--force" not in go_on(read_run(slurm.run))
    spec = JobSpec.load(Path(chain.jobs[0].spec))
    assert spec.command[spec.command.index("--force-id") + 1] == chain.id and "--force" not in spec.command


def test_a_file_system_without_locks_or_links(slurm, monkeypatch):
    def none(*_, **more):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", none)
    monkeypatch.setattr(os, "link", none)
    result = slurm.submit("--stage", "all", "launch.encode.array=2")
    assert result.returncode == 0, result.stderr
    assert len(chain_of(slurm).jobs) == 8
    pickles = list((slurm.run / "logs/slurm").glob("103*_submitted.pkl"))
    assert len(pickles) == 3 and len({path.read_bytes() for path in pickles}) == 1
    assert all(path.stat().st_nlink == 1 for path in pickles), "there were no links"


def test_a_refused_submission_says_what_is_queued(slurm):
    result = slurm.submit("--stage", "all", REFUSED="103")
    assert result.returncode == 2
    assert "trial-encode" in result.stderr and "invalid partition" in result.stderr
    assert f"--cancel {slurm.run}" in result.stderr and "(101 102)" in result.stderr
    assert [job.id for job in chain_of(slurm).jobs] == ["101", "102"], "what is queued can be cancelled"
    assert "Nothing is queued" in slurm.submit("--stage", "all", "name=other", REFUSED="103").stderr


def test_nothing_to_submit(slurm):
    slurm.done("shard")
    result = slurm.submit("--stage", "shard")
    assert result.returncode == 0 and "nothing to submit" in result.stdout and not list(slurm.queue.iterdir())
    assert "nothing to do" in slurm.submit("--stage", "shard", "--dry-run").stdout


def test_nodes_that_failed_twice_are_left_out(slurm):
    for node in ("n3", "n7"):
        for job in ("1.0", "1.1"):
            add_strike(slurm.run, node, job, "went down")
    (slurm.run / "launch/stop").touch()
    result = slurm.submit("--stage", "all")
    assert result.returncode == 0 and "left out  n7: failed twice within a day" in result.stdout
    assert "not left out  n3: failed twice within a day as well, but of 1 nodes no more than 1" in result.stdout
    assert option((slurm.queue / "104").read_text(), "exclude") == "n7"
    assert not (slurm.run / "launch/stop").exists(), "it was meant for what ran then"


def test_all_that_the_site_forbids_is_told_at_once(slurm):
    result = slurm.submit(
        "--stage", "all", "--nodes", "4", "train.micro_batch=1", "launch.secrets=[NO_SUCH_TOKEN]",
        "launch.limits={nodes: 2, time: 60, array: 3, jobs: 4, gpu_memory_gb: 0.000001}",
        "launch.environment={HF_TOKEN: hf_abc}", "launch.train.time=4")
    assert result.returncode == 2 and not list(slurm.queue.iterdir()) and not (slurm.run / "code").exists()
    queued = 11 + 4 * len(STAGES["shard"].phases)
    for part in ("train asks for 4 nodes; the site gives a job 2", "asks for 240 min; the site gives a job 60",
                 "shard-read has 4 elements; the site allows 3", f"{queued} jobs would be queued; the site allows 4",
                 "a GPU here has 1e-06 GB", "your shell has no such variable", "HF_TOKEN, which looks like a secret",
                 "nothing would be left to train in"):
        assert part in result.stderr, part
    assert "hf_abc" not in result.stdout + result.stderr
    least = "launch.limits={nodes: 4, time: 240, array: 4, jobs: " + str(queued) + ", gpu_memory_gb: 1}"
    result = slurm.submit("--stage", "all", "--nodes", "4", "train.micro_batch=1", least, "launch.train.time=5")
    assert result.returncode == 0, result.stderr


def test_a_disk_or_ranks_that_do_not_fit_are_told_before(slurm):
    result = slurm.submit("--stage", "all", "train.checkpoint.permanent_every=1", "train.steps=200000000",
                          "train.warmup_steps=3")
    assert result.returncode == 2 and "checkpoints" in result.stderr and "are free where" in result.stderr
    result = slurm.submit("--stage", "all", "--nodes", "3", "--dry-run")
    assert result.returncode == 2
    assert "not divisible by 24 (train.micro_batch 4 x 6 data-parallel ranks)" in result.stderr


def test_a_profile_is_named_on_the_command_line(slurm):
    (slurm.work / "clusters").mkdir()
    (slurm.work / "clusters/ours.yaml").write_text("partition: gpu\nenvironment: {NCCL_DEBUG: INFO}\n")
    result = slurm.submit("--stage", "all", "--cluster", "ours")
    assert result.returncode == 0 and "slurm (profile ours)" in result.stdout
    chain = chain_of(slurm)
    assert chain.cluster == "ours" and option((slurm.queue / "104").read_text(), "partition") == "gpu"
    assert JobSpec.load(Path(chain.jobs[3].spec)).environment["NCCL_DEBUG"] == "INFO"
    assert read_json(slurm.run / "launch/chain.json")["cluster"] == "ours"


def test_an_evaluation_beside_training_is_submitted_from_a_process_of_its_own(slurm):
    assert slurm.submit("--stage", "all", "launch.gpus_per_node=2", "launch.cpus=3").returncode == 0
    chain = chain_of(slurm)
    spec = JobSpec.load(Path(chain.jobs[3].spec))
    assert submit_apart(spec, 20) == "108"
    job = chain_of(slurm).jobs[-1]
    assert (job.name, job.kind, job.id, job.dependencies) == ("trial-evaluate-step-00000020", "evaluation", "108", ())
    made = JobSpec.load(Path(job.spec))
    assert made.command[:3] == (spec.command[0], "-m", "launch.slurm.evaluations")
    assert (made.run, made.cpus_per_task) == (str(slurm.run / "evaluations/step-00000020"), 6)
    assert option((slurm.queue / "108").read_text(), "gpus-per-node") == "2"
    Path(chain.config).write_text(Path(chain.config).read_text().replace("cpus: 3", "cpus: 4"))
    with pytest.raises(OSError, match="is not the configuration that was submitted"):
        submit_apart(spec, 40)
