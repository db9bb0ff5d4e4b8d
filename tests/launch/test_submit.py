"""The command line: plan, refusals, questions."""

import os
import shlex
from functools import partial

import pytest

from drover.launch import submit
from drover.pipeline.contract.entry import stage_main
from drover.pipeline.contract.stages import STAGES
from drover.pipeline.core import errors
from drover.pipeline.core.files import write_text
from tests.conftest import REPOSITORY
from tests.launch.launcher import planned
from tests.refusal import refused, table
from tests.test_house import HEAVY, imported_by


def rows(text):
    """State and resources by stage, from a printed plan."""
    parts = [line.partition(" ") for line in text.splitlines()]
    return {name: " ".join(rest.split()) for name, _, rest in reversed(parts) if name in STAGES}


def test_the_examples_can_be_typed():
    parser = submit.main.parser()
    lines = [line.split()[2:] for line in parser.description.splitlines() if line.startswith("    python launch/")]
    assert len(lines) >= 5
    for line in lines:
        parser.parse_intermixed_args(line)


def test_planning_imports_nothing_heavy(launcher):
    (launcher.work / "text.txt").write_text("some text")
    status, text, modules = imported_by(
        "-m", "drover", "plan", "--config", "config.yaml", "shard.sources=[{kind: files, name: t, paths: [text.txt]}]",
        cwd=launcher.work)
    assert status == 0 and modules & HEAVY <= {"numpy"}, text  # which tells how fast this machine is


def test_plan_of_a_fresh_run(launcher):
    shown = launcher.accepted("--stage all --dry-run --cluster local")
    count = len(os.sched_getaffinity(0)) // 2 or 1
    ranks = f"2 ranks x {count} thread{'s' * (count > 1)}"
    assert not launcher.run.exists()
    assert rows(shown) == dict(table(f"""
        shard -> absent 2 processes
        tokenizer -> absent 2 processes shard
        encode -> absent 2 processes tokenizer
        train -> absent {ranks} encode
        convert -> absent 1 process train
        evaluate -> absent {ranks} convert
        report -> absent 1 process evaluate"""))
    for words in ("runs/trial", "8,192 tokens a step = 32 sequences of 256 = 2 ranks x micro-batch 4 x 4 accumulated",
                  "30 steps = 245,760 tokens",
                  "5,246,208 parameters",  # 2 x 1024 x 256 + 6 x (196608 + 589824 + 512) + 256
                  "# train, each of 2 ranks\n", "-m drover.pipeline.train --config config.yaml"):
        assert words in shown


def test_finished_resumable_and_changed_stages(launcher):
    launcher.done("shard", "tokenizer", "encode")
    requested, changed = "--stage shard,tokenizer,encode --dry-run", "encode.dtype: \"auto\" -> \"uint32\""
    other, again = f"{requested} encode.dtype=uint32", launcher.accepted(requested)
    done = "nothing to do: all asked stages are done"
    assert rows(again)["encode"] == "done" and done in again and "-m drover.pipeline" not in again
    assert rows(launcher.accepted("--stage all --dry-run"))["encode"] == "done"
    seen = launcher.call("--config", "config.yaml", "--cluster", "slurm", program=submit.show_plan).stdout
    assert rows(seen)["encode"] == "done" and "drover.pipeline" not in seen, "the table alone"
    (launcher.run / "tokenizer" / "manifest.json").unlink()
    resumable = rows(launcher.accepted(requested))
    assert "resumable (will continue)" in resumable["tokenizer"]
    assert resumable["encode"] == "absent 2 processes tokenizer", "it may come back as it was"
    launcher.done("tokenizer")
    message = launcher.refused(other)
    assert changed in message and "--stage encode,train,convert,evaluate,report --force" in message
    assert changed in launcher.refused(other, "--accept-changes"), "data stages are rebuilt"
    assert rows(launcher.accepted(other, "--force"))["encode"].startswith("rebuild (now changed) 2 processes")
    before = launcher.refused("--stage encode --dry-run tokenizer.vocab_size=2048 --force")
    assert "tokenizer.vocab_size: 1024 -> 2048" in before, "a stage before the asked one is not served"
    launcher.done("train", "convert")
    assert "add train.phases, with" in launcher.refused("--stage train --dry-run 'train.mixture={stdlib: 1}'")
    learned = "--stage train,convert --dry-run train.lr=0.5"
    assert "train.lr" in launcher.refused(learned)
    write_text(launcher.run / "train/checkpoints/step-00000010/COMPLETE.json",
               '{"format": 2, "progress": {"step": 10}, "files": [], '
               '"config": {"train": {"batch_tokens": 4096}}}')
    assert rows(launcher.accepted(learned, "--accept-changes"))["convert"].startswith("absent 1 process train")
    scored = f"{learned} --cluster slurm evaluate.every=10 train.checkpoint.every_steps=10"
    assert "watch" in planned(launcher.accepted(scored, "--accept-changes"))
    unscored = scored.replace("train.lr=0.5", "")
    assert "dependency" not in planned(launcher.accepted(unscored))["watch"], "training is done, not this"
    assert "watch" not in planned(launcher.accepted(unscored.replace("every=10", "every=20")))
    for settings in (learned, "--stage train --dry-run model.layers=3 --accept-changes"):
        shown = launcher.submit(settings)
        assert shown.returncode == 2, "no way leads there"
    assert "or as another network." in shown.stderr


@pytest.mark.parametrize("arguments, message", [("", "No stage is given"), *table("""
    --stage tran -> There is no stage tran | convert, evaluate, report, or all
    --stage train -> shard, tokenizer, encode of runs/trial are not done | --stage shard,tokenizer,encode,train
    --stage all train.learning=1 -> unknown key 'train.learning'
    --stage all train.batch_tokens=8448 train.warmup_steps=99 model.heads=7 -> 4 problems | 33 sequences \
(train.batch_tokens 8448 / train.sequence_length 256) is not divisible by 2 data-parallel ranks | \
train.warmup_steps 99 | dim (256) must be divisible by heads (7)
    --stage all --cluster local --nodes 2 -> --nodes | --cluster slurm
    --stage all --cluster slurm -> no sbatch on PATH
    --stage all stages.curv.every=5 -> stages.curv: there is no stage curv; shard, tokenizer
    --stage train train.attention=nosuch:Nope --stage all -> train.attention names nosuch:Nope, but there is no \
module nosuch""")])
def test_refusals_start_nothing(launcher, arguments, message):
    complaint = launcher.refused(arguments)
    assert not launcher.run.exists() and complaint.startswith("error: ")
    assert all(part in complaint for part in message.split(" | ")), complaint


@pytest.mark.parametrize("words, message", table("""
    c.toml -> error: c.toml is not read: a configuration is YAML.
    c.yaml --config other -> error: a command takes one configuration, and these are 2: other, c.yaml. Leave out all
    c.yaml name=x d.yml -> these are 2: c.yaml, d.yml""", shlex.split))
def test_two_configurations_are_refused(words, message, capsys):
    for program in (submit.run, partial(stage_main, "train", None)):
        refused(SystemExit, "2", program, words)
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("words, message", table("""
    nofig.yaml -> nofig.yaml cannot be read: No such file | Give an existing file; did you mean 'config.yaml'?
    config/demo.yaml -> did you mean 'configs/demo.yaml'?
    much/further/away.yml -> Give an existing file; `drover init DATA` writes one.
    config.yaml x -> 'x' is not an override | --config FILE takes any name
    rates.yaml -> rates.yaml is the file of a sweep | `drover sweep rates.yaml`
    mix.yaml -> mix.yaml is the file of a mixture | `drover mixture mix.yaml`
    configs/experiments/ladder.yaml -> ladder.yaml is the file of a ladder | `drover ladder /
    config -> No configuration, a word that ends in .yaml, is given, so nothing starts.
    demo -> No configuration, a word that ends in .yaml, is given, so nothing starts."""))
def test_a_configuration_that_is_not_there(launcher, words, message):
    write_text(launcher.work / "configs/demo.yaml", "")
    write_text(launcher.work / "rates.yaml", "base: configs/demo.yaml\nvary: {train.lr: [1, 2]}\nseeds: [0]\n")
    write_text(launcher.work / "mix.yaml", "base: configs/demo.yaml\nmixtures: 8\nseeds: [0]\n")
    complaint = launcher.call(*words.split(), program=submit.run).stderr
    assert all(part in complaint for part in message.split(" | ")), complaint


@pytest.mark.parametrize("words", [["./a=b/c.yml"], ["name=x.yaml", "./c=d.yaml"], ["--config", "a b", "name=x.yaml"]])
def test_the_file_is_the_word_that_ends_in_yaml(launcher, words):
    for word in words:
        write_text(launcher.work / word, "name: trial")
    options = submit.run.parser().parse_intermixed_args([*words, "train.steps=3"])
    assert options.config in words and "train.steps=3" in options.overrides
    assert launcher.call(*words, "--stage", "shard", program=submit.show_plan).returncode == 0


@pytest.mark.parametrize("words, message", table("""
    --lr 3e-4 --batch-size=32 -> there is no option --lr; settings have no dashes; did you mean 'train.lr=3e-4'? | \
there is no option --batch-size; settings have no dashes; did you mean 'train.batch_tokens=VALUE' (counted in tokens
    --training.seq_len 512 --training.steps=10 -> there is no option --training.seq_len; settings have no dashes; \
did you mean 'train.sequence_length=512', 'model.context_length=512'? | did you mean 'train.steps=10'?
    --vocab-size --compile c.yaml -> 'tokenizer.vocab_size=VALUE', 'model.vocab_size=VALUE'? | 'train.compile=VALUE'?
    --mem 4GB -> did you mean 'launch.mem=4GB', 'launch.shard.mem=4GB', 'launch.tokenizer.mem=4GB' and 5 more?
    --clutser slurm -> there is no option --clutser; did you mean '--cluster'?""", shlex.split))
def test_an_option_that_is_a_setting_is_answered_with_it(words, message, capsys):
    for program in (submit.run, partial(stage_main, "train", None)):
        refused(SystemExit, "2", program, words)
        complaint = capsys.readouterr().err
        if "--clutser" not in words or program is submit.run:
            assert all(part in complaint for part in message.split(" | ")), complaint


def test_no_configuration(launcher):
    arguments = shlex.split("--stage all --dry-run --cluster local")
    (launcher.work / "configs").mkdir()
    (launcher.work / "config.yaml").rename(launcher.work / "configs/demo.yaml")
    assert launcher.call(*arguments).stdout.startswith("config    configs/demo.yaml, since no file is")
    for program, words in (submit.run, ""), (submit.main, "  - No stage is given"):
        bare = launcher.call(program=program)
        assert bare.returncode == 2 and not launcher.run.exists() and words in bare.stderr
        assert "`drover run configs/demo.yaml` runs the demo" in bare.stderr
    (launcher.work / "configs/demo.yaml").unlink()
    for words, why in ([], ", since no file is given"), (["configs/demo.yaml"], "\n"):
        assert launcher.call(*arguments, *words).stdout.startswith(f"config    {REPOSITORY}/configs/demo.yaml{why}")


@pytest.mark.parametrize("words, problem", table("""
    --stage evaluate --nodes 4 -> --nodes and --gpus-per-node are for Slurm
    --stage evaluate --gpus-per-node 2 --cluster local -> --nodes and --gpus-per-node are for Slurm
    --stage evaluate --nodes 4 --cluster slurm -> There is no sbatch on PATH
    --stage evaluate --cluster local -> evaluate cannot start"""))
def test_where_it_cannot_run_is_refused_with_all_else(launcher, words, problem):
    complaint = launcher.refused(words)
    assert problem in complaint and "shard, tokenizer, encode, train, convert of runs/trial are not done" in complaint
    assert "Request them too (--stage shard,tokenizer,encode,train,convert,evaluate)" in complaint


def test_packages_that_jobs_lack_are_named_with_all_else(launcher, monkeypatch):
    launcher.with_slurm(monkeypatch)
    monkeypatch.setattr(errors, "find_spec", lambda module: None)
    complaint = launcher.refused("--stage train,evaluate train.precision=fp8")
    for part in ("submitit", "torchao", "tensorboard", "encode, convert of runs/trial are"):
        assert part in complaint, complaint


def test_where_it_runs(launcher, monkeypatch):
    requested = "--stage shard --dry-run"
    here = launcher.accepted(requested)
    assert "local (no sbatch on PATH" in here and "-m drover.pipeline.shard --config config.yaml" in here
    shown = launcher.accepted(f"{requested} --nodes 1")
    assert "slurm (no sbatch on PATH)" in shown and "additional_parameters:" in shown
    assert "are for Slurm, but this runs here (no sbatch" in launcher.refused("--stage shard --nodes 1")
    result = launcher.submit(f"{requested} --cluster local --gpus-per-node 8")
    assert result.stderr.startswith("error: --nodes") and not result.stdout, "no plan"
    assert "slurm (sbatch on PATH)" in launcher.with_slurm(monkeypatch).accepted(requested)


def test_more_nodes_than_there_are_are_refused_without_the_plan(launcher, monkeypatch):
    launcher.with_slurm(monkeypatch).programs.say("sinfo", "cpu*|1|8|9|(null)|9\ngpu|1|4|9|gpu:1|9\ngpu|3|8|9|gpu:8|9")
    result = launcher.submit("--stage all --dry-run --nodes 4")
    assert "train requests 4 nodes, and its partition has 1 (sinfo)" in result.stderr and not result.stdout
    launcher.accepted("--stage all --dry-run --nodes 4 launch.partition=gpu")
