"""The stage contract: what is done, what is stale, what is refused, and what survives a kill.

The bodies here are tiny, so that the contract itself is tested; the stages' own tests use the real bodies.
"""

import os
import subprocess

import pytest

import drover.pipeline.contract
from drover.__main__ import main as drover_command
from drover.pipeline.config.kinds import PLUGINS
from drover.pipeline.config.loading import config_hash, load_config
from drover.pipeline.contract import stage_work
from drover.pipeline.contract.locks import lock
from drover.pipeline.contract.manifest import read_manifest
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import atomic_file, output_record, read_json, write_text
from tests.conftest import run_python
from tests.refusal import printed
from tests.stand_ins import call, copy_corpus, count_bytes, count_bytes_again, never


def test_a_finished_stage_is_up_to_date_and_its_manifest_says_what_it_was_made_of(place, capsys):
    assert call(place, "shard", copy_corpus) == 0
    assert call(place, "shard", never) == call(place, "shard", never, "launch.processes=2") == 0
    assert capsys.readouterr().out.count("up to date") == 2
    call(place, "tokenizer", count_bytes)
    shard, tokenizer = (read_manifest(place / "runs/a" / stage) for stage in ("shard", "tokenizer"))
    assert tokenizer.fingerprint["inputs"] == {"shard": shard.digest}
    assert list(shard.fingerprint["files"]) == ["t/corpus.txt"]
    assert shard.software["python"] and shard.code["pipeline/shard.py"] and shard.wall_s > 0
    assert shard.config_sha256 == tokenizer.config_sha256 == config_hash(load_config(place / "runs/a/config.yaml"))


def test_why_calls_a_plugin_changed_only_if_it_was_imported(place, no_plugins, capsys):
    plugin, run = place / "theirs.py", place / "runs/a"
    write_text(plugin, "")
    assert call(place, "shard", copy_corpus, f"plugins=[{plugin}]") == 0
    PLUGINS.clear()
    write_text(plugin, "changed = True")
    assert f"names plugins that were not imported: {plugin}. " in printed(capsys, drover_command, "why", run, "shard")
    assert "code has changed" not in printed(capsys, drover_command, "why", run, "shard")
    named = printed(capsys, drover_command, "why", run, "shard", "--plugin", plugin)
    assert "code has changed since: theirs" in named and "not imported" not in named
    assert "shard" in printed(capsys, drover_command, "status", run, "--plugin", plugin)


@pytest.fixture
def trained(place):
    """A run of which the stages up to the export are done, and a report."""
    for stage, body in (("shard", copy_corpus), ("tokenizer", count_bytes), ("encode", count_bytes_again),
                        ("train", train), ("convert", copy_model)):
        assert call(place, stage, body) == 0
    folder = place / "runs/a/report"
    folder.mkdir()
    read_manifest(place / "runs/a/convert").write(folder)
    return place


def train(work):
    write_text(work.folder / "model.txt", f"{work.config.train.steps} {work.accepted}")
    work.commit([output_record(work.folder, work.folder / "model.txt")], {"steps": work.config.train.steps})


def copy_model(work):
    folder, _ = work.input("train")
    write_text(work.folder / "copy.txt", (folder / "model.txt").read_text())
    work.commit([output_record(work.folder, work.folder / "copy.txt")], {})


def test_changes_are_accepted_for_training_alone(trained, refusal):
    for stage, other in (("shard", "shard.validation_share=0.5"), ("tokenizer", "tokenizer.vocab_size=1024")):
        for arguments in ([], ["--accept-changes"]):
            assert f"{other.partition('=')[0]}: " in refusal(stage, other, *arguments)
    for arguments in ([], ["--accept-changes"]):
        shown = refusal("train", "model.dim=512", *arguments)
        assert "as another network" in shown and "to continue training" not in shown
    rate = "train.lr=0.5"
    folder = trained / "runs/a"
    shown = refusal("train", rate)
    assert f"continue: name=<another> reuse={folder} for a run" in shown and "keep the training, which is done" in shown
    assert call(trained, "train", train, rate, "name=b", f"reuse={folder}") == 0
    assert "train.lr: 0.003 -> 0.5" in shown and "train.lr" in refusal("convert", rate)
    assert call(trained, "train", never, rate, "--accept-changes") == 0, "there is no further step to take"
    assert read_manifest(folder / "train").accepted == ["train.lr: 0.003 -> 0.5"]
    assert read_manifest(folder / "report") is None, "it is made again, to show the change"
    assert call(trained, "train", never, rate) == call(trained, "convert", never, rate) == 0


def test_training_continues_with_accepted_changes_and_what_follows_is_rebuilt(trained, refusal):
    more = "train.steps=2000"
    folder = trained / "runs/a"
    assert "continue: --accept-changes to continue training" in refusal("train", more)
    assert call(trained, "train", train, more, "--accept-changes") == 0
    [change] = read_manifest(folder / "train").accepted
    assert change.startswith("train.steps: ") and change.endswith(" -> 2000")
    assert "outputs of the stage train: " in refusal("convert", more)
    write_text(folder / "convert/old.txt", "of the model before")
    assert call(trained, "convert", copy_model, more, "--accept-changes") == 0
    assert (folder / "convert/copy.txt").read_text().startswith("2000 ") and not (folder / "convert/old.txt").exists()
    assert call(trained, "train", never, more) == call(trained, "convert", never, more) == 0


def test_outputs_that_do_not_read_back_are_not_committed_and_a_damaged_manifest_is_named(place, refusal):
    def corrupt(work):
        path = work.folder / "text.txt"
        write_text(path, "right")
        record = output_record(work.folder, path)
        path.write_text("wrong")
        work.commit([record], {})
    assert "does not read back" in refusal("shard", body=corrupt)
    assert read_manifest(place / "runs/a/shard") is None
    (place / "runs/a/shard/manifest.json").write_text("{")
    assert "manifest.json is damaged" in refusal("shard")
    assert call(place, "shard", copy_corpus, "--force") == 0


def test_a_forced_stage_whose_input_is_gone_keeps_its_outputs(place, refusal):
    assert call(place, "shard", copy_corpus) == 0
    (place / "corpus.txt").unlink()
    assert "corpus.txt" in refusal("shard", "--force")
    assert read_manifest(place / "runs/a/shard") is not None and (place / "runs/a/shard/text.txt").exists()


def test_a_stage_that_refused_its_input_is_made_once_that_is_corrected(place):
    def refuse(work):
        write_text(work.folder / "left.txt", "half")
        raise UserError("the corpus is in Latin-1")
    assert call(place, "shard", refuse) == 2
    (place / "corpus.txt").write_text("in UTF-8\n")
    assert call(place, "shard", copy_corpus) == 0
    assert (place / "runs/a/shard/text.txt").read_text() == "IN UTF-8\n"
    assert call(place, "tokenizer", refuse) == 2
    assert call(place, "tokenizer", count_bytes, "tokenizer.vocab_size=1024") == 0
    assert not (place / "runs/a/tokenizer/left.txt").exists()


def test_what_only_one_rank_knows_is_heard(refusal, monkeypatch):
    def fail(work):
        raise UserError("the cable is loose")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr("drover.pipeline.contract.entry.Channel.of_process", lambda: None)
    monkeypatch.setattr("drover.pipeline.contract.entry.SILENCE_S", 0)
    assert "shard stops here on rank 1: the cable is loose" in refusal("shard", body=fail)


def test_reuse_takes_finished_stages_by_reference_also_through_a_run_that_reuses_and_nothing_else(place, refusal):
    call(place, "shard", copy_corpus)
    reuse = f"reuse={place}/runs/a"
    through = f"reuse={place}/runs/b"
    assert call(place, "shard", never, "name=b", reuse) == call(place, "tokenizer", count_bytes, "name=b", reuse) == 0
    assert not (place / "runs/b/shard").exists()
    made = read_manifest(place / "runs/b/tokenizer")
    assert made.fingerprint["inputs"]["shard"] == read_manifest(place / "runs/a/shard").digest
    assert call(place, "shard", never, "name=c", through) == call(place, "tokenizer", never, "name=c", through) == 0
    for *arguments, expected in (("name=b", reuse, "shard.validation_share=0.5", "shard.validation_share: 0.01 -> 0.5"),
                             ("name=b", f"reuse={place}/runs/nothing", "holds no run"),
                             (reuse, "this same run"), (through, "this same run")):
        assert expected in refusal("tokenizer", *arguments)


def test_a_stage_that_is_being_read_is_not_rebuilt(place, refusal):
    call(place, "shard", copy_corpus)
    with lock(place / "runs/a", "shard", shared=True), lock(place / "runs/a", "shard", shared=True):
        assert f"is in use by process {os.getpid()} on" in refusal("shard", "--force")
        assert call(place, "shard", never) == 0  # up to date needs no lock
    assert call(place, "shard", copy_corpus, "--force") == 0


def test_the_stage_on_the_page_of_the_contract_is_all_that_one_has_to_write(place):
    page = drover.pipeline.contract.__doc__
    shown = page[:page.index("The contract does everything else")].splitlines()
    code = "\n".join(line[4:] for line in shown if line[:4].isspace() or not line)
    (place / "words.py").write_text(code)
    assert call(place, "shard", copy_corpus) == 0
    # A plugin may also register a stage whose module is another one, which knows of it by the configuration only.
    (place / "registers.py").write_text(
        "from drover.pipeline.contract.stages import Stage, register_stage\n"
        "register_stage(Stage('other', needs=('shard',), reads=(), code=(), own_module='other_main'))\n")
    (place / "other_main.py").write_text(
        "import sys\nfrom drover.pipeline.contract.entry import stage_main\n"
        "sys.exit(stage_main('other', lambda work: work.commit([], {})))\n")
    # From here on in processes of their own: a plugin that this one imported would stay for all other tests.
    (place / "c.yaml").write_text(f"{(place / 'c.yaml').read_text()}plugins: [words.py, registers.py]\n")
    for file, expected in (("words.py", "words     done in"), ("words.py", "words     up to date"),
                       ("other_main.py", "other     done in")):
        assert expected in run_python(place / file, "--config", place / "c.yaml").stdout
    assert read_json(place / "runs/a/words/text.txt.json") == {"words": 2}
    words, other = (read_manifest(place / "runs/a" / stage).code for stage in ("words", "other"))
    assert {"words", "registers"} <= words.keys() and other.keys() - words.keys() == {"other_main"}
    (place / "words.py").write_text(code.replace('stage_main("words"', 'stage_main("wrods"'))
    wrong = run_python(place / "words.py", "--config", place / "c.yaml", check=False)
    assert "'wrods', but no stage of this name is registered" in wrong.stderr


def test_git_state_of_a_snapshot_is_that_of_what_it_was_made_of(tmp_path, monkeypatch):
    monkeypatch.setattr(stage_work, "IMPORTED_FROM", tmp_path)
    write_text(tmp_path / "snapshot.json", '{"commit": "abc", "changed": true, "made": "2026-01-01"}')
    assert stage_work.git_state() == {"commit": "abc", "changed": True}


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_a_run_from_a_checkout_of_another_user_has_its_commit(tmp_path):
    """Git itself refuses such a repository where it has to look for it."""
    for command in "init -q .", "-c user.name=a -c user.email=a@b commit -q --allow-empty -m first":
        subprocess.run(["git", "-C", tmp_path, *command.split()], check=True)
    for path in (tmp_path, *tmp_path.rglob("*")):
        os.chown(path, 12345, 12345)
    refusal = subprocess.run(["git", "-C", tmp_path, "rev-parse", "HEAD"], capture_output=True, text=True,
                             env={**os.environ, "HOME": str(tmp_path)}).stderr
    assert "dubious ownership" in refusal
    assert stage_work.git(tmp_path, "rev-parse", "HEAD") and stage_work.git(tmp_path, "status", "--porcelain") == ""
    (tmp_path / "inside").mkdir()
    assert stage_work.git(tmp_path / "inside", "rev-parse", "HEAD") is None, "that is no repository itself"


def test_an_atomic_file_appears_whole_and_one_that_others_may_have_mapped_only_with_another_content(tmp_path):
    path = tmp_path / "x"
    with pytest.raises(RuntimeError), atomic_file(path) as file:
        file.write(b"half")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    path.write_bytes(b"one")
    before = path.stat().st_ino
    for content, same in ((b"one", True), (b"two", False)):
        with atomic_file(path, keep_equal=True) as file:
            file.write(content)
        assert path.read_bytes() == content and (path.stat().st_ino == before) is same
        assert list(tmp_path.iterdir()) == [path]
