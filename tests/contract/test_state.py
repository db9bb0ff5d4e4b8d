"""STATE.json, forcing once for an id: what a stage says of itself, whatever befalls it."""

from drover.pipeline.contract import state as state_module
from drover.pipeline.contract.locks import lock
from drover.pipeline.contract.manifest import read_manifest
from drover.pipeline.contract.state import PROGRESS, Progress, ProgressRecord, read_state, write_state
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import read_json, write_json, write_text
from tests.refusal import refused
from tests.stand_ins import call, copy_corpus, count_bytes, in_chain, never, state


def test_the_state_says_how_a_stage_ended(place, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    seen = []
    shard = place / "runs/a/shard"

    def look(work):
        seen.append(state(place))
        copy_corpus(work)

    def raising(error, *arguments):
        def body(work):
            raise error(*arguments)  # a new one each time: it holds on to its frames, and so to the lock
        return body

    def stopped(work):
        write_state(work.folder, "preempted", step=4, reason="time limit", again=True)
    for body, status, result, reason in (
            (raising(UserError, "the corpus is in Latin-1"), 2, ("failed", None), "the corpus is in Latin-1"),
            (lambda work: None, 1, ("failed", None), "returned without work.commit"),
            (raising(KeyboardInterrupt), 130, ("preempted", None), ""), (stopped, 130, ("preempted", 4), ""),
            (look, 0, ("done", None), "")):
        assert call(place, "shard", body) == status and state(place) == result
        assert reason in read_state(shard).reason
    assert seen == [("running", None)] and read_state(shard).job == "77"
    assert "STATE.json" not in [record["path"] for record in read_manifest(shard).outputs]
    refused(ZeroDivisionError, "^$", call, place, "shard", raising(ZeroDivisionError), "--force")
    assert state(place) == ("running", None)  # whoever finds this knows that it crashed


def test_the_state_of_a_finished_stage_is_made_right(place):
    call(place, "shard", copy_corpus)
    path = place / "runs/a/shard/STATE.json"
    write_state(path.parent, "running")  # killed between the manifest and this
    assert call(place, "shard", never) == 0 and state(place) == ("done", None)
    assert call(place, "shard", never, "shard.validation_share=0.5") == 2 and state(place) == ("failed", None)
    assert call(place, "shard", never) == 0 and state(place) == ("done", None)
    path.write_text("{")  # truncated
    held = lock(place / "runs/a", "shard")
    assert call(place, "shard", never) == 0 and path.read_text() == "{"  # others have it
    held.close()
    assert call(place, "shard", never) == 0 and state(place) == ("done", None)


def test_a_job_is_told_why_a_stage_could_not_begin(place, monkeypatch):
    assert call(place, "tokenizer", never) == 2 and not (place / "runs/a/tokenizer").exists()
    monkeypatch.setattr("drover.pipeline.contract.entry.NETWORK_S", 1.0)
    assert call(place, "tokenizer", never, *in_chain("c1")) == 2 and state(place, "tokenizer") == ("failed", None)
    assert "The stage shard of" in read_state(place / "runs/a/tokenizer").reason
    call(place, "shard", copy_corpus)
    assert call(place, "tokenizer", count_bytes) == 0 and state(place, "tokenizer") == ("done", None)


def test_settings_that_cannot_work_change_no_state_and_do_not_concern_what_is_up_to_date(place, monkeypatch):
    wrong, shard = "convert.average=[2, 1]", place / "runs/a/shard"
    write_state(shard, "preempted", step=4)
    with monkeypatch.context() as patch:
        patch.setattr("drover.pipeline.contract.run.look", never)  # no file is looked at
        assert call(place, "shard", never, wrong) == 2 and state(place) == ("preempted", 4)
    assert call(place, "shard", copy_corpus) == call(place, "shard", never, wrong) == 0
    for changed in ("--force", "shard.validation_share=0.5"):
        assert call(place, "shard", never, wrong, changed) == 2 and state(place) == ("done", None)


def test_force_id_forces_once(place):
    made = []

    def body(work):
        made.append(work.name)
        copy_corpus(work)
    for identifier, times in [("one", 1), ("one", 1), ("two", 2), ("two", 2), ("one", 3)]:
        assert call(place, "shard", body, "--force-id", identifier) == 0 and len(made) == times
    half = place / "runs/a/shard/half.txt"
    for arguments in (["--force-id", "three"], []):  # without the ID it is not forgotten
        assert call(place, "shard", lambda work: write_text(half, "half"), *arguments) == 1
    assert call(place, "shard", body, "--force-id", "three") == 0 and half.exists()
    (place / "runs/a/shard/started.json").write_text("{")
    assert call(place, "shard", body, "--force-id", "three") == 0 and not half.exists()


def test_progress_is_written_now_and_then_and_ends_nothing(tmp_path, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(state_module.time, "monotonic", lambda: clock[0])
    record = ProgressRecord(tmp_path)
    path = tmp_path / PROGRESS
    for done, seconds, written in ((1, 100, 1), (2, 102, 1), (3, 107, 3), (4, 107, 3)):
        clock[0] = seconds
        record.note(Progress(done, 9, "tasks"))
        assert read_json(path)["done"] == written
    record.flush()
    assert read_json(path)["done"] == 4
    ProgressRecord(path).note(Progress(1, 9, "tasks"))  # no folder to write to


def test_starts_of_one_chain_count_as_one_piece_of_work(place, monkeypatch):
    started = place / "runs/a/shard/started.json"
    for chain, kept in (("c1", True), ("c2", False)):
        assert call(place, "shard", lambda work: None, "--force", *in_chain("c1")) == 1
        write_json(started, {**read_json(started), "at": "2026-01-01T00:00:00+00:00"})
        assert call(place, "shard", copy_corpus, *in_chain(chain)) == 0
        assert (read_manifest(started.parent).started == "2026-01-01T00:00:00+00:00") == kept
