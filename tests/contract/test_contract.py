"""The stage contract: what is done, what is stale, what is refused, and what survives a kill.

The bodies here are tiny, so that the contract itself is tested; the stages' own tests use the real bodies.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import pipeline.contract.stage_work
from pipeline.config.loading import load_config
from pipeline.contract.locks import lock
from pipeline.contract.manifest import read_manifest
from pipeline.contract.run import Run
from pipeline.contract.stage_work import Unit, git_state, set_aside
from pipeline.errors import UserError
from pipeline.files import atomic_file, output_record, write_text
from tests.stand_ins import call, copy_corpus, count_bytes, count_bytes_again, never, state
from tests.waiting import wait_for

REPOSITORY = Path(__file__).resolve().parents[2]


def test_a_finished_stage_is_up_to_date(place, capsys):
    assert call(place, "shard", copy_corpus) == 0
    assert call(place, "shard", never) == 0
    assert "up to date" in capsys.readouterr().out


def test_the_manifest_says_what_the_stage_was_made_of(place):
    call(place, "shard", copy_corpus)
    call(place, "tokenizer", count_bytes)
    shard, tokenizer = (read_manifest(place / "runs/a" / stage) for stage in ("shard", "tokenizer"))
    assert tokenizer.fingerprint["inputs"] == {"shard": shard.digest}
    assert list(shard.fingerprint["files"]) == ["t/corpus.txt"]
    assert shard.outputs[0]["bytes"] == 10 and len(shard.outputs[0]["sha256"]) == 64
    assert shard.software["python"] and shard.code["pipeline/shard.py"] and shard.wall_s > 0
    assert load_config(place / "runs/a/config.yaml").name == "a"


def test_a_changed_setting_is_refused_with_old_and_new(place, capsys):
    call(place, "shard", copy_corpus)
    assert call(place, "shard", never, "shard.heldout_share=0.5") == 2
    assert "shard.heldout_share: 0.01 -> 0.5" in capsys.readouterr().err


def test_a_changed_input_file_is_refused_by_name(place, capsys):
    call(place, "shard", copy_corpus)
    (place / "corpus.txt").write_text("other text\n")
    assert call(place, "shard", never) == 2
    assert "input file t/corpus.txt has other content" in capsys.readouterr().err


def test_a_touched_but_equal_input_file_changes_nothing(place):
    call(place, "shard", copy_corpus)
    os.utime(place / "corpus.txt", (1, 1))
    assert call(place, "shard", never) == 0


def test_execution_settings_make_nothing_stale(place):
    call(place, "shard", copy_corpus)
    assert call(place, "shard", never, "launch.processes=2") == 0


def test_the_same_text_elsewhere_is_the_same_input(place):
    call(place, "shard", copy_corpus)
    (place / "moved").mkdir()
    (place / "corpus.txt").rename(place / "moved/corpus.txt")
    assert call(place, "shard", never, f"shard.sources.0.paths=[{place}/moved/corpus.txt]") == 0


def test_a_rebuilt_stage_before_makes_the_next_one_stale(place, capsys):
    call(place, "shard", copy_corpus)
    call(place, "tokenizer", count_bytes)
    (place / "corpus.txt").write_text("other text\n")
    assert call(place, "shard", copy_corpus, "--force") == 0
    assert call(place, "tokenizer", never) == 2
    assert "outputs of the stage shard" in capsys.readouterr().err
    assert call(place, "tokenizer", count_bytes, "--force") == 0


def test_force_with_equal_bytes_leaves_the_next_stage_valid(place):
    call(place, "shard", copy_corpus)
    call(place, "tokenizer", count_bytes)
    assert call(place, "shard", copy_corpus, "--force") == 0
    assert call(place, "tokenizer", never) == 0


def test_accepted_drift_is_served_and_leaves_its_trace_downstream(place):
    call(place, "shard", copy_corpus)
    assert call(place, "shard", never, "shard.heldout_share=0.5", "--accept-drift") == 0
    assert call(place, "shard", never, "shard.heldout_share=0.5") == 0  # accepted once is accepted
    assert call(place, "tokenizer", count_bytes, "shard.heldout_share=0.5") == 0
    for stage in ("shard", "tokenizer"):
        drift = read_manifest(place / "runs/a" / stage).drift
        assert drift == [{"stage": "shard", "differences": ["shard.heldout_share: 0.01 -> 0.5"]}]


def test_a_stage_without_its_inputs_is_refused(place, capsys):
    assert call(place, "tokenizer", never) == 2
    assert "The stage shard of" in capsys.readouterr().err


def test_a_body_that_does_not_commit_is_no_success(place):
    assert call(place, "shard", lambda work: None) != 0
    assert read_manifest(place / "runs/a/shard") is None


def test_a_lost_output_is_made_again(place, capsys):
    call(place, "shard", copy_corpus)
    (place / "runs/a/shard/text.txt").unlink()
    assert call(place, "shard", copy_corpus) == 0
    assert "text.txt is missing; making it again" in capsys.readouterr().out
    assert (place / "runs/a/shard/text.txt").read_text() == "SOME TEXT\n"


def test_outputs_that_do_not_read_back_are_not_committed(place, capsys):
    def corrupt(work):
        path = work.folder / "text.txt"
        write_text(path, "right")
        record = output_record(work.folder, path)
        path.write_text("wrong")
        work.commit([record], {})
    assert call(place, "shard", corrupt) == 2
    assert "does not read back" in capsys.readouterr().err
    assert read_manifest(place / "runs/a/shard") is None


def test_a_damaged_manifest_is_named(place, capsys):
    call(place, "shard", copy_corpus)
    (place / "runs/a/shard/manifest.json").write_text("{")
    assert call(place, "shard", never) == 2
    assert "manifest.json is damaged" in capsys.readouterr().err
    assert call(place, "shard", copy_corpus, "--force") == 0


def test_begun_outputs_of_other_settings_are_not_mixed(place, capsys):
    call(place, "shard", lambda work: None)
    assert call(place, "shard", never, "shard.heldout_share=0.5") == 2
    assert "was begun with other" in capsys.readouterr().err
    assert call(place, "shard", never, "shard.heldout_share=0.5", "--accept-drift") == 2
    assert call(place, "shard", copy_corpus, "shard.heldout_share=0.5", "--force") == 0


def test_a_stage_that_refused_its_input_is_made_once_that_is_corrected(place, capsys):
    def refuse(work):
        write_text(work.folder / "left.txt", "half")
        raise UserError("the corpus is in Latin-1")
    assert call(place, "shard", refuse) == 2
    assert call(place, "shard", refuse) == 2  # the same again is the same again
    (place / "corpus.txt").write_text("mended\n")
    assert call(place, "shard", copy_corpus) == 0
    assert (place / "runs/a/shard/text.txt").read_text() == "MENDED\n"
    assert call(place, "tokenizer", lambda work: refuse(work)) == 2
    assert call(place, "tokenizer", count_bytes, "tokenizer.vocab_size=1024") == 0


def test_drift_accepted_late_reaches_what_was_made_before_and_renews_the_report(place):
    call(place, "shard", copy_corpus)
    call(place, "tokenizer", count_bytes)
    report = place / "runs/a/report"
    report.mkdir()
    read_manifest(place / "runs/a/tokenizer").write(report)
    assert call(place, "shard", never, "shard.heldout_share=0.5", "--accept-drift") == 0
    assert [entry["stage"] for entry in read_manifest(place / "runs/a/tokenizer").drift] == ["shard"]
    assert call(place, "tokenizer", never, "shard.heldout_share=0.5") == 0
    assert read_manifest(report) is None


def test_forced_training_keeps_the_old_checkpoints(place):
    call(place, "shard", copy_corpus)
    run = Run(load_config(place / "c.yaml"))
    (run.own_folder("train") / "checkpoints").mkdir(parents=True)
    aside = set_aside(run.own_folder("train"), keep=True)
    assert aside.name == "train.replaced-1" and (aside / "checkpoints").is_dir()


def test_reuse_takes_finished_stages_by_reference(place):
    call(place, "shard", copy_corpus)
    reuse = f"reuse={place}/runs/a"
    assert call(place, "shard", never, "name=b", reuse) == 0
    assert call(place, "tokenizer", count_bytes, "name=b", reuse) == 0
    assert not (place / "runs/b/shard").exists()
    made = read_manifest(place / "runs/b/tokenizer")
    assert made.fingerprint["inputs"]["shard"] == read_manifest(place / "runs/a/shard").digest


def test_reuse_reaches_through_a_run_that_reuses(place):
    call(place, "shard", copy_corpus)
    call(place, "tokenizer", count_bytes, "name=b", f"reuse={place}/runs/a")
    assert call(place, "shard", never, "name=c", f"reuse={place}/runs/b") == 0
    assert call(place, "tokenizer", never, "name=c", f"reuse={place}/runs/b") == 0


def test_reuse_of_something_else_is_refused(place, capsys):
    call(place, "shard", copy_corpus)
    assert call(place, "shard", never, "name=b", f"reuse={place}/runs/a", "shard.heldout_share=0.5") == 2
    assert call(place, "shard", never, "name=b", f"reuse={place}/runs/nothing") == 2
    error = capsys.readouterr().err
    assert "shard.heldout_share: 0.01 -> 0.5" in error and "holds no run" in error


def test_two_processes_cannot_work_on_one_stage(place):
    held = lock(place / "runs/a", "shard")
    with pytest.raises(UserError, match=f"in use by process {os.getpid()}"):
        lock(place / "runs/a", "shard")
    held.close()
    lock(place / "runs/a", "shard").close()


def test_a_stage_that_is_being_read_is_not_rebuilt(place, capsys):
    call(place, "shard", copy_corpus)
    reading = lock(place / "runs/a", "shard", shared=True)
    also = lock(place / "runs/a", "shard", shared=True)
    assert call(place, "shard", never, "--force") == 2
    assert "is in use by" in capsys.readouterr().err
    assert call(place, "shard", never) == 0  # up to date needs no lock
    reading.close()
    also.close()
    assert call(place, "shard", copy_corpus, "--force") == 0


def test_a_run_that_reuses_itself_is_refused(place, capsys):
    call(place, "shard", copy_corpus)
    assert call(place, "tokenizer", never, f"reuse={place}/runs/a") == 2
    call(place, "tokenizer", count_bytes, "name=b", f"reuse={place}/runs/a")
    assert call(place, "tokenizer", never, f"reuse={place}/runs/b") == 2
    assert capsys.readouterr().err.count("this very run") == 2


def test_settings_of_a_stage_further_back_are_not_stale_in_silence(place, capsys):
    call(place, "shard", copy_corpus)
    assert call(place, "tokenizer", never, "shard.heldout_share=0.5") == 2
    assert "shard.heldout_share: 0.01 -> 0.5" in capsys.readouterr().err


def test_a_finished_run_needs_its_corpus_no_more(place):
    call(place, "shard", copy_corpus)
    (place / "corpus.txt").unlink()
    assert call(place, "tokenizer", count_bytes) == 0


def test_drift_accepted_later_reaches_manifests_two_stages_on(place):
    call(place, "shard", copy_corpus)
    call(place, "tokenizer", count_bytes)
    call(place, "shard", never, "shard.heldout_share=0.5", "--accept-drift")
    call(place, "encode", count_bytes_again, "shard.heldout_share=0.5")
    assert [entry["stage"] for entry in read_manifest(place / "runs/a/encode").drift] == ["shard"]


def test_why_and_changed_code(place, monkeypatch):
    call(place, "shard", copy_corpus)
    run = Run(load_config(place / "c.yaml"))
    assert run.why("shard") == "shard: done"
    manifest = read_manifest(place / "runs/a/shard")
    manifest.code["pipeline/shard.py"] = "other"
    manifest.write(place / "runs/a/shard")
    assert "made by other code: pipeline/shard.py" in run.why("shard")
    stale = Run(load_config(place / "c.yaml", ["shard.shard_mb=1"]))
    assert "shard.shard_mb: 64.0 -> 1.0" in stale.why("shard")


def test_a_full_disk_is_one_paragraph(place, capsys):
    def full(work):
        raise OSError(28, "No space left on device", str(work.folder / "x"))
    assert call(place, "shard", full) == 2
    assert "is full" in capsys.readouterr().err


def test_other_errors_keep_their_traceback(place):
    def broken(work):
        raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError):
        call(place, "shard", broken)


def test_git_state_of_a_snapshot_is_that_of_what_it_was_made_of(tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline.contract.stage_work, "REPOSITORY", tmp_path)
    write_text(tmp_path / "snapshot.json", json.dumps({"commit": "abc", "changed": True, "made": "2026-01-01"}))
    assert git_state() == {"commit": "abc", "changed": True}


def test_an_atomic_file_appears_whole_or_not_at_all(tmp_path):
    with pytest.raises(RuntimeError), atomic_file(tmp_path / "x") as file:
        file.write(b"half")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_others_may_have_mapped_is_replaced_only_by_another_content(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"one")
    before = path.stat().st_ino
    for content, same in ((b"one", True), (b"two", False)):
        with atomic_file(path, keep_equal=True) as file:
            file.write(content)
        assert path.read_bytes() == content and (path.stat().st_ino == before) is same
        assert list(tmp_path.iterdir()) == [path]


UNITS = '''
import os, sys, time
from pathlib import Path
from pipeline.contract.entry import stage_main
from pipeline.files import output_record, write_text
from pipeline.contract.stage_work import Unit

def make(folder, number):
    while number > 5 and not Path(os.environ["GATE"]).exists():
        time.sleep(0.005)
    path = folder / f"part-{number}.txt"
    write_text(path, str(number) * 1000)
    return {"outputs": [output_record(folder, path)], "number": number}

def body(work):
    records = work.do_units("parts", [Unit(f"part-{number}", number) for number in range(12)], make)
    work.commit([output for record in records for output in record["outputs"]],
                {"numbers": [record["number"] for record in records]})

if __name__ == "__main__":
    sys.exit(stage_main("shard", body))
'''
"""A stage of twelve units, of which those after the sixth wait for the file GATE."""


@pytest.mark.parametrize("processes", [1, 3])
def test_a_killed_stage_continues_at_its_unfinished_units(place, processes):
    script = place / "units.py"
    script.write_text(UNITS)
    command = [sys.executable, str(script), "--config", str(place / "c.yaml"), f"launch.processes={processes}"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "GATE": str(place / "gate")}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    units = place / "runs/a/shard/units/parts"
    wait_for(lambda: units.is_dir() and len(list(units.glob("*.json"))) >= 3, of=process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    survivors = {path.name: path.stat().st_mtime_ns for path in units.glob("*.json")}
    assert state(place) == ("running", None)
    assert 3 <= len(survivors) < 12 and read_manifest(place / "runs/a/shard") is None
    (place / "gate").touch()
    again = subprocess.run([*command[:-1], "launch.processes=2"], env=environment, capture_output=True, text=True,
                           check=True)
    manifest = read_manifest(place / "runs/a/shard")
    assert manifest.counts == {"numbers": list(range(12))}, again.stdout
    assert all((units / name).stat().st_mtime_ns == time_ns for name, time_ns in survivors.items())
    assert not list(place.rglob("*.tmp"))


def test_units_of_other_settings_are_not_taken(place):
    made = []

    def make(folder, number):
        made.append(number)
        write_text(folder / f"{number}.txt", "x")
        return {"outputs": [output_record(folder, folder / f"{number}.txt")]}

    def body(work):
        work.do_units("parts", [Unit("one", 1), Unit("two", 2)], make)
    call(place, "shard", body)
    call(place, "shard", body)
    assert made == [1, 2]
    unit = place / "runs/a/shard/units/parts/one.json"
    unit.write_text(json.dumps({**json.loads(unit.read_text()), "key": "other"}))
    (place / "runs/a/shard/2.txt").write_text("longer than it was")
    call(place, "shard", body)
    assert made == [1, 2, 1, 2]


