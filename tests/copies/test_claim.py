"""Whose a store is: of two who come at once one is refused, and the dead give way."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace

import pytest

from drover.pipeline.copies import claim
from drover.pipeline.copies.claim import LOCK, RUN, Lock, RunRecord, put_if
from drover.pipeline.errors import UserError
from drover.pipeline.stores.store import Changed, Store
from tests.waiting import wait_for


@pytest.fixture
def store(tmp_path):
    return Store(f"file://{tmp_path}/store")


@pytest.fixture
def lock(store):
    """From a folder's id to a lock whose own thread sleeps, and what it says; all are given up at the end."""
    made = []

    def make(here, taken=False, **times):
        said = []
        made.append(Lock(store, here, said.append, **{"beat_s": 1000.0, "dead_s": 1000.0, **times}))
        if taken:
            made[-1].take()
        return made[-1], said
    yield make
    for lock in made:
        lock.release()


def renewing(lock):
    """Have another thread renew it, quickly."""
    lock.beat_s = 0.01
    threading.Thread(target=lock._renew, daemon=True).start()


def test_who_comes_second_is_refused_while_the_first_lives(lock):
    first, _ = lock("a", taken=True, beat_s=0.05)
    second, said = lock("b", beat_s=0.05)
    with pytest.raises(UserError, match=r"is in use: process \d+ on .* copies checkpoints there"):
        second.take()
    assert len(said) == 1 and "waiting up to 1000 s" in said[0] and not first.lost


def test_who_gives_no_sign_of_life_gives_way_and_hears_of_it_by_looking_or_renewing(lock, store):
    looking, _ = lock("a", taken=True)
    second, said = lock("b", taken=True, beat_s=0.05, dead_s=0.1)
    assert "took over" in said[-1] and json.loads(store.read(LOCK))["here"] == "b"
    assert not looking.lost and not looking.held() and "took over file://" in looking.lost
    assert second.held()
    looking.release()
    assert store.head(LOCK) is not None, "one that is lost is not removed"
    second.release()
    renewed, _ = lock("c", taken=True)
    store.delete([LOCK])
    renewing(renewed)
    wait_for(lambda: renewed.lost)
    assert not renewed.held() and "was removed" in renewed.lost


@pytest.mark.parametrize("slow", [1, 2, 3])
def test_while_the_store_does_not_answer_nobody_is_thought_dead(lock, monkeypatch, slow):
    """The read number `slow` takes as long as it takes a lock to count as dead; the holder renews after that."""
    first, _ = lock("a", taken=True)
    second, _ = lock("b", beat_s=2.0, dead_s=75.0)
    clock, reads, read = [1000.0], [], second._read

    def pass_(seconds):
        clock[0] += seconds

    def stumbling():
        reads.append(None)
        if len(reads) == slow:
            pass_(80.0)
        if len(reads) == slow + 15:
            assert first._put(first._etag)
        return read()
    with monkeypatch.context() as patch, pytest.raises(UserError, match="is in use"):
        patch.setattr(second, "_read", stumbling)
        patch.setattr(claim, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=pass_))
        second.take()
    assert first.held()


def test_a_beat_whose_answer_was_lost_does_not_give_the_lock_up(lock, store):
    own, _ = lock("a", taken=True)
    before = store.put(LOCK, store.read(LOCK) + b"\n", replaces=own._etag).etag  # as an earlier beat of it
    renewing(own)
    wait_for(lambda: store.head(LOCK).etag != before)
    assert not own.lost and own.held()


def test_an_earlier_process_of_the_same_folder_is_not_waited_for(lock, store):
    lock("a", taken=True)
    again, said = lock("a", taken=True)
    assert not said
    again.release()
    assert store.head(LOCK) is None


@pytest.mark.parametrize("of", ["moto_server", *(pytest.param(name, marks=pytest.mark.slow)
                                                 for name in ("seaweed", "google", "azurite"))])
def test_of_many_who_come_at_once_one_gets_it(of, request):
    store = Store(request.getfixturevalue(of).url)
    made = [Lock(store, str(number), lambda text: None, beat_s=0.2) for number in range(6)]

    def take(lock):
        with suppress(UserError):
            lock.take()
            return lock
    with ThreadPoolExecutor(6) as pool:
        [taken] = filter(None, pool.map(take, made))
    assert not taken.lost
    taken.release()
    assert store.head(LOCK) is None


@pytest.mark.parametrize("of", ["moto_server", *(pytest.param(name, marks=pytest.mark.slow)
                                                 for name in ("google", "azurite"))])
def test_a_store_that_stumbles_does_not_take_the_lock_away(of, request):
    bucket = request.getfixturevalue(of)
    store = Store(bucket.url)
    lock = Lock(store, "a", lambda text: None, beat_s=0.05)
    lock.take()
    faults = [bucket.fail(kind, 3, method="PUT", path=LOCK) for kind in ("refuse", "error")]
    wait_for(lambda: all(fault.met == 3 for fault in faults))
    now = store.head(LOCK).etag
    wait_for(lambda: store.head(LOCK).etag != now)
    assert not lock.lost
    lock.release()


def test_a_write_whose_answer_was_lost_is_found_by_looking(store, monkeypatch):
    put = Store.put

    def lost(self, path, data, **condition):
        put(self, path, data, **condition)
        return put(self, path, data, **condition)  # as a client does that has had no answer
    monkeypatch.setattr(Store, "put", lost)
    entry = put_if(store, RUN, b"mine", None)
    assert store.read(RUN) == b"mine" and entry.etag
    second = put_if(store, RUN, b"mine again", entry.etag)
    monkeypatch.setattr(Store, "put", put)
    with pytest.raises(Changed):
        put_if(store, RUN, b"theirs", entry.etag)
    assert put_if(store, RUN, b"theirs", second.etag).etag


def test_the_record_of_a_run_is_written_by_one(store):
    first, second = RunRecord(store), RunRecord(store)
    first.write(name="mini", id="1", fingerprint={}, drift=[])
    with pytest.raises(UserError, match="at the same moment"):
        second.write(name="mini", id="2", fingerprint={}, drift=[])
    assert RunRecord(store).content["id"] == "1"
    first.write(name="mini", id="1", fingerprint={"a": 1}, drift=[])
    assert RunRecord(store).content["fingerprint"] == {"a": 1}


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"format": 99}'])
def test_a_record_of_somebody_else_is_refused(store, content):
    store.put(RUN, content)
    with pytest.raises(UserError, match="not what Drover puts there"):
        RunRecord(store)


def test_the_lock_is_renewed_far_more_often_than_it_takes_to_count_as_dead():
    assert claim.BEAT_S * 4 < claim.DEAD_S
