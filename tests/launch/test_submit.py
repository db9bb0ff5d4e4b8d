"""The command line: plan, refusals, questions."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from launch.submit import parser
from pipeline.contract.stages import REPOSITORY, STAGES
from tests.launch.fake_house import House


def rows(text: str) -> dict[str, str]:
    """State and resources by stage, from a printed plan."""
    parts = [line.partition(" ") for line in text.splitlines()]
    return {name: " ".join(rest.split()) for name, _, rest in reversed(parts) if name in STAGES}


def test_help_is_light_and_shows_examples() -> None:
    result = subprocess.run([sys.executable, "-X", "importtime", "launch/submit.py", "--help"], cwd=REPOSITORY,
                            capture_output=True, text=True, check=True)
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert "argparse" in imported
    assert not imported & {"torch", "numpy", "submitit", "pydantic", "rich", "pyarrow"}
    assert "--stage all --config configs/demo.yaml --cluster local" in result.stdout


def test_examples_in_the_help_parse() -> None:
    lines = [line.split()[2:] for line in (parser().epilog or "").splitlines() if "python launch/submit.py" in line]
    assert len(lines) >= 5
    for line in lines:
        parser().parse_intermixed_args(line)


def test_planning_never_imports_torch(house: House) -> None:
    code = ("import sys; sys.argv[0] = 'submit'; from launch.submit import main; status = main(sys.argv[1:]);"
            "heavy = {'torch', 'transformers', 'pyarrow'} & set(sys.modules); sys.exit(f'{status} {heavy}')")
    result = subprocess.run([sys.executable, "-c", code, "--config", "config.yaml", "--stage", "all", "--dry-run"],
                            cwd=house.work, env=house.environ(PYTHONPATH=str(house.root)), capture_output=True,
                            text=True, check=False)
    assert result.stderr.strip() == "0 set()"


def test_plan_of_a_fresh_run(house: House) -> None:
    result = house.submit("--stage", "all", "--dry-run", "--cluster", "local")
    assert result.returncode == 0 and not house.started() and not house.run.exists()
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


def test_what_a_llama_has_not_is_told_and_refused_where_it_cannot_be_exported(house: House) -> None:
    both = ["--dry-run", "--cluster", "local", "model.qk_norm=true", "model.no_rope_layer_interval=2"]
    refused = house.submit("--stage", "all", *both)
    assert refused.returncode == 2 and "1 problem in the configuration" in refused.stderr
    assert "no class of transformers computes" in refused.stderr
    assert "--stage shard,tokenizer,encode,train" in refused.stderr
    told = house.submit("--stage", "shard,tokenizer,encode,train", *both, "model.sliding_window=64",
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


def test_finished_partial_and_stale_stages(ready: House) -> None:
    house = ready
    again = house.submit("--stage", "shard,tokenizer,encode")
    assert again.returncode == 0 and not house.started()
    assert rows(again.stdout)["encode"] == "done -" and "encode    up to date" in again.stdout

    (house.run / "tokenizer" / "manifest.json").unlink()
    partial = house.submit("--stage", "tokenizer,encode", "--dry-run")
    assert "partial (will continue)" in rows(partial.stdout)["tokenizer"]
    assert "waiting (for tokenizer)" in rows(partial.stdout)["encode"], "it may come back as it was"
    assert house.submit("--stage", "tokenizer,encode").returncode == 0
    assert house.started() == ["tokenizer-0"]

    house.forget()
    stale = house.submit("--stage", "shard,tokenizer,encode", "encode.dtype=uint32")
    assert stale.returncode == 2 and not house.started()
    assert "stale: encode.dtype: \"auto\" -> \"uint32\"" in rows(stale.stdout)["encode"]
    assert "encode.dtype: \"auto\" -> \"uint32\"" in stale.stderr and "--accept-drift" in stale.stderr
    assert "--stage encode,train,convert,evaluate,report --force" in stale.stderr
    above = house.submit("--stage", "tokenizer,encode", "tokenizer.algorithm=unigram")
    assert above.returncode == 2 and rows(above.stdout)["encode"].startswith("waiting (for tokenizer)")


def test_settings_that_differ_show_although_the_inputs_are_gone(house: House) -> None:
    assert house.submit("--stage", "shard,tokenizer").returncode == 0
    (house.run / "shard" / "manifest.json").unlink()
    result = house.submit("--stage", "shard,tokenizer", "tokenizer.vocab_size=2048")
    assert result.returncode == 2 and "tokenizer.vocab_size: 1024 -> 2048" in result.stderr


def test_a_stale_stage_is_accepted_or_rebuilt(house: House) -> None:
    house.submit("--stage", "shard,tokenizer")
    house.forget()
    accepted = house.submit("--stage", "tokenizer", "--accept-drift", "tokenizer.vocab_size=2048")
    assert accepted.returncode == 0 and "accepted as it is" in accepted.stdout and not house.started()
    forced = house.submit("--stage", "tokenizer", "--force", "tokenizer.vocab_size=4096")
    assert forced.returncode == 0 and house.started() == ["tokenizer-0"]
    assert rows(forced.stdout.partition("tokenizer rank")[0])["tokenizer"] == "rebuild (now stale) 2 processes"


def test_a_stale_stage_before_the_asked_one_is_not_served(ready: House) -> None:
    result = ready.submit("--stage", "encode", "tokenizer.vocab_size=2048", "--force")
    assert result.returncode == 2 and not ready.started()
    assert "tokenizer.vocab_size: 1024 -> 2048" in result.stderr and "--stage tokenizer,encode" in result.stderr


@pytest.mark.parametrize(("arguments", "said"), [
    (["--stage", "tran"], ["does not know tran", "convert, evaluate, report, or all"]),
    (["--stage", "train"], ["tokenizer, encode of runs/trial are not done", "--stage tokenizer,encode,train"]),
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
def test_refusals_start_nothing(house: House, arguments: list[str], said: list[str]) -> None:
    result = house.submit(*arguments)
    assert result.returncode == 2
    assert not house.started() and not house.run.exists()
    assert "Traceback" not in result.stderr and result.stderr.startswith("\ndrover stops here: ")
    for text in said:
        assert text in result.stderr


def test_no_configuration(house: House) -> None:
    arguments = house.command("--stage", "all", "--dry-run", "--cluster", "local")
    result = subprocess.run(arguments, cwd=house.work, env=house.environ(), capture_output=True, text=True, check=False)
    assert result.returncode == 2 and "No configuration is given" in result.stderr
    (house.work / "configs").mkdir()
    (house.work / "config.yaml").rename(house.work / "configs/demo.yaml")
    result = subprocess.run(arguments, cwd=house.work, env=house.environ(), capture_output=True, text=True, check=False)
    assert result.returncode == 0 and result.stdout.startswith("config    configs/demo.yaml, since no --config is")


def test_explain_works_without_a_configuration(house: House) -> None:
    def explain(*arguments: str) -> str:
        return subprocess.run(house.command("--explain", *arguments), cwd=house.work, env=house.environ(),
                              capture_output=True, text=True, check=True).stdout
    assert "default: 0.003   now: 0.003" in explain("train.lr")
    assert "default: 0.003   now: 0.5" in explain("train.lr", "--config", "config.yaml", "train.lr=0.5")
    assert explain("train").count("type:") < explain().count("type:")


def test_why(house: House) -> None:
    house.submit("--stage", "shard,tokenizer")
    result = house.submit("--why", "tokenizer", "tokenizer.algorithm=unigram")
    assert result.returncode == 0
    assert result.stdout == "tokenizer: stale\n  tokenizer.algorithm: \"bpe\" -> \"unigram\"\n"
    with (house.root / "pipeline" / "shard.py").open("a") as file:
        file.write("# changed\n")
    assert "made by other code: pipeline/shard.py" in house.submit("--why", "shard").stdout
    warned = house.submit("--stage", "shard")
    assert warned.returncode == 0 and "warning: made by other code" in warned.stdout


def test_auto_takes_slurm_where_there_is_sbatch(house: House) -> None:
    tools = house.work / "bin"
    tools.mkdir()
    here = house.submit("--stage", "shard", "--dry-run")
    assert "local (no sbatch on PATH" in here.stdout and "#SBATCH" not in here.stdout
    (tools / "sbatch").write_text("#!/bin/sh\n")
    (tools / "sbatch").chmod(0o755)
    there = house.submit("--stage", "shard", "--dry-run", PATH=str(tools))
    assert "slurm (sbatch is on PATH)" in there.stdout and "#SBATCH" in there.stdout
