"""The command line: plan, refusals, questions."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from launch import submit
from launch.submit import parser
from pipeline.contract.stages import REPOSITORY, STAGES


def rows(text: str) -> dict[str, str]:
    """State and resources by stage, from a printed plan."""
    parts = [line.partition(" ") for line in text.splitlines()]
    return {name: " ".join(rest.split()) for name, _, rest in reversed(parts) if name in STAGES}


def test_help_and_planning_import_nothing_heavy(launcher):
    result = subprocess.run([sys.executable, "-X", "importtime", REPOSITORY / "launch/submit.py", "--help"],
                            capture_output=True, text=True, check=True)
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert "argparse" in imported
    assert not imported & {"torch", "numpy", "submitit", "pydantic", "rich", "pyarrow"}
    assert "--stage all --config configs/demo.yaml --cluster local" in result.stdout
    lines = [line.split()[2:] for line in (parser().epilog or "").splitlines() if "python launch/submit.py" in line]
    assert len(lines) >= 5
    for line in lines:
        parser().parse_intermixed_args(line)
    (launcher.work / "text.txt").write_text("some text")
    code = ("import sys; sys.argv[0] = 'submit'; from launch.submit import main; status = main(sys.argv[1:]);"
            "heavy = {'torch', 'transformers', 'pyarrow'} & set(sys.modules); sys.exit(f'{status} {heavy}')")
    result = subprocess.run([sys.executable, "-c", code, "--config", "config.yaml", "--stage", "all", "--dry-run",
                             "shard.sources=[{kind: files, name: t, paths: [text.txt]}]"],
                            capture_output=True, text=True, check=False)
    assert result.stderr.strip() == "0 set()"


def test_plan_of_a_fresh_run(launcher):
    result = launcher.submit("--stage", "all", "--dry-run", "--cluster", "local")
    assert result.returncode == 0 and not launcher.run.exists()
    assert rows(result.stdout) == {
        "shard": "to do 2 processes", "tokenizer": "waiting (for shard) 2 processes",
        "encode": "waiting (for tokenizer) 2 processes",
        "train": f"waiting (for encode) 2 ranks x {threads()}", "convert": "waiting (for train) 1 process",
        "evaluate": f"waiting (for convert) 2 ranks x {threads()}", "report": "waiting (for evaluate) 1 process"}
    assert "runs/trial" in result.stdout
    assert "8,192 tokens a step = 32 sequences of 256 = 2 ranks x micro batch 4 x 4 accumulated" in result.stdout
    assert "30 steps = 245,760 tokens" in result.stdout
    assert "5,246,208 parameters" in result.stdout  # 2 x 1024 x 256 + 6 x (196608 + 589824 + 512) + 256
    assert max(map(len, result.stdout.partition("# shard")[0].splitlines())) <= 100
    assert "\x1b" not in result.stdout
    assert "-m torch.distributed.run --standalone --nproc-per-node 2 -m pipeline.train --config" in result.stdout


def test_what_a_llama_has_not_is_told_and_refused_where_it_cannot_be_exported(launcher):
    both = ["--dry-run", "--cluster", "local", "model.qk_norm=true", "model.no_rope_layer_interval=2"]
    refused = launcher.submit("--stage", "all", *both)
    assert refused.returncode == 2 and "1 problem in the configuration" in refused.stderr
    assert "no class of transformers computes" in refused.stderr
    assert "--stage shard,tokenizer,encode,train" in refused.stderr
    told = launcher.submit("--stage", "shard,tokenizer,encode,train", *both, "model.sliding_window=64",
                        "model.full_attention_interval=3")
    assert told.returncode == 0, told.stderr
    lines = told.stdout.splitlines()
    place = next(number for number, line in enumerate(lines) if line.startswith("model "))
    assert lines[place + 1:place + 4] == [
        "           with queries and keys normed (QK-norm)",
        "           with a sliding window of 64 tokens (all in one layer of 3)",
        "           with no rotary embedding in one layer of 2"]


def threads() -> str:
    """Threads of each of two ranks here."""
    count = max(1, len(os.sched_getaffinity(0)) // 2)
    return "1 thread" if count == 1 else f"{count} threads"


def test_finished_partial_and_stale_stages(launcher):
    launcher.done("shard", "tokenizer", "encode")
    asked = ("--stage", "shard,tokenizer,encode", "--dry-run")
    again = launcher.submit(*asked)
    assert again.returncode == 0 and rows(again.stdout)["encode"] == "done -" and "nothing to do" in again.stdout

    (launcher.run / "tokenizer" / "manifest.json").unlink()
    partial = launcher.submit(*asked)
    assert "partial (will continue)" in rows(partial.stdout)["tokenizer"]
    assert "waiting (for tokenizer)" in rows(partial.stdout)["encode"], "it may come back as it was"
    stale = launcher.submit(*asked, "encode.dtype=uint32")
    assert stale.returncode == 2 and "encode.dtype: \"auto\" -> \"uint32\"" in stale.stderr, "though inputs are gone"

    launcher.done("tokenizer")
    stale = launcher.submit(*asked, "encode.dtype=uint32")
    assert stale.returncode == 2
    assert "stale: encode.dtype: \"auto\" -> \"uint32\"" in rows(stale.stdout)["encode"]
    assert "encode.dtype: \"auto\" -> \"uint32\"" in stale.stderr and "--accept-drift" in stale.stderr
    assert "--stage encode,train,convert,evaluate,report --force" in stale.stderr
    assert launcher.submit(*asked, "encode.dtype=uint32", "--accept-drift").returncode == 0
    forced = launcher.submit(*asked, "encode.dtype=uint32", "--force")
    assert forced.returncode == 0 and rows(forced.stdout)["encode"].startswith("rebuild (now stale) 2 processes")
    above = launcher.submit("--stage", "tokenizer,encode", "--dry-run", "tokenizer.algorithm=unigram")
    assert above.returncode == 2 and rows(above.stdout)["encode"].startswith("waiting (for tokenizer)")
    before = launcher.submit("--stage", "encode", "--dry-run", "tokenizer.vocab_size=2048", "--force")
    assert before.returncode == 2, "a stage before the asked one is not served"
    assert "tokenizer.vocab_size: 1024 -> 2048" in before.stderr and "--stage tokenizer,encode" in before.stderr

    (launcher.run / "encode" / "manifest.json").unlink()
    mixed = launcher.submit(*asked, "encode.dtype=uint32", "--accept-drift")
    assert mixed.returncode == 2 and "encode was only begun, and outputs of two settings must not" in mixed.stderr


@pytest.mark.parametrize(("arguments", "said"), [
    (["--stage", "tran"], ["does not know tran", "convert, evaluate, report, or all"]),
    (["--stage", "train"], ["tokenizer, encode of runs/trial are not done", "--stage tokenizer,encode,train"]),
    (["--stage", "encode,train", "--cluster", "local"], ["shard, tokenizer of runs/trial are not done"]),
    (["--stage", "all", "train.learning=1"], ["unknown key 'train.learning'"]),
    (["--stage", "all", "train.steps=many"], ["'train.steps' is 'many'"]),
    (["--stage", "all", "train.micro_batch=5", "train.warmup_steps=99", "model.heads=7"],
     ["4 problems", "32 sequences (train.batch_tokens 8192 / train.sequence_length 256) is not divisible by 10 "
      "(train.micro_batch 5 x 2 data-parallel ranks)", "train.warmup_steps 99",
      "dim (256) must be divisible by heads (7)"]),
    (["--stage", "all", "--cluster", "local", "--nodes", "2"], ["--nodes", "--cluster slurm"]),
    (["--stage", "all", "--cluster", "slurm"], ["no sbatch on PATH"]),
    (["--stage", "all", "stages.curv.every=5"], ["stages.curv: there is no stage curv; shard, tokenizer"]),
    (["--stage", "train", "train.attention=nosuch:Nope", "--stage", "all"],
     ["train.attention names nosuch:Nope, but there is no module nosuch"]),
    ([], ["No stage is given"]),
    (["--why", "trian"], ["does not know trian"]),
    (["--explain", "train.lrr"], ["There is no setting 'train.lrr'", "train.lr"]),
])
def test_refusals_start_nothing(launcher, arguments, said):
    result = launcher.submit(*arguments)
    assert result.returncode == 2
    assert not launcher.run.exists() and result.stderr.startswith("\ndrover stops here: ")
    for text in said:
        assert text in result.stderr


def test_no_configuration(launcher, monkeypatch):
    arguments = ("--stage", "all", "--dry-run", "--cluster", "local")
    with monkeypatch.context() as patch:
        patch.setattr(submit, "USUAL", Path("configs/absent.yaml"))
        result = launcher.call(*arguments)
        assert result.returncode == 2 and "No configuration is given" in result.stderr
    (launcher.work / "configs").mkdir()
    (launcher.work / "config.yaml").rename(launcher.work / "configs/demo.yaml")
    result = launcher.call(*arguments)
    assert result.returncode == 0 and result.stdout.startswith("config    configs/demo.yaml, since no --config is")


def test_explain_works_without_a_configuration(launcher):
    def explain(*arguments):
        return launcher.call("--explain", *arguments).stdout
    assert "default: 0.003   now: 0.003" in explain("train.lr")
    assert "default: 0.003   now: 0.5" in explain("train.lr", "--config", "config.yaml", "train.lr=0.5")
    assert "default: 0.003   now: 0.5" in explain("train.lr=0.5", "--config", "config.yaml")
    assert "is laid over a file, but none is given" in launcher.call("--explain", "train.lr=0.5").stderr
    assert explain("train").count("type:") < explain().count("type:")


def test_why(launcher, monkeypatch):
    launcher.done("shard", "tokenizer")
    result = launcher.submit("--why", "tokenizer", "tokenizer.algorithm=unigram")
    assert result.returncode == 0
    assert result.stdout == "tokenizer: stale\n  tokenizer.algorithm: \"bpe\" -> \"unigram\"\n"
    monkeypatch.setitem(STAGES, "shard", replace(STAGES["shard"], code=()))
    assert "made by other code: pipeline/data" in launcher.submit("--why", "shard").stdout
    warned = launcher.submit("--stage", "shard", "--cluster", "local")
    assert warned.returncode == 0 and "warning: made by other code than is here now (pipeline/" in warned.stdout
    assert "shard     up to date" in warned.stdout and "all done in" in warned.stdout


def test_where_it_runs(launcher, monkeypatch):
    asked = ("--stage", "shard", "--dry-run")
    here = launcher.submit(*asked)
    assert "local (no sbatch on PATH" in here.stdout and "#SBATCH" not in here.stdout
    assert "-m pipeline.shard --config config.yaml" in here.stdout
    shown = launcher.submit(*asked, "--nodes", "1")
    assert "slurm (no sbatch here: only shown)" in shown.stdout and "#SBATCH" in shown.stdout
    refused = launcher.submit("--stage", "shard", "--nodes", "1")
    assert refused.returncode == 2 and "--nodes and --gpus-per-node are asked of Slurm, but there is" in refused.stderr
    rehearsed = launcher.submit("--stage", "shard", "--rehearse")
    assert rehearsed.returncode == 2 and "--rehearse is for jobs on Slurm" in rehearsed.stderr
    launcher.with_slurm(monkeypatch)
    there = launcher.submit(*asked)
    assert "slurm (sbatch is on PATH)" in there.stdout and "#SBATCH" in there.stdout
