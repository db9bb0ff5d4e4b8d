"""Whose a store is: of two who come at once one is refused, and the dead give way."""

import json
import threading
from types import SimpleNamespace

import pytest

from pipeline.copies import claim
from pipeline.copies.claim import LOCK, RUN, Lock, RunRecord, put_if
from pipeline.errors import UserError
from pipeline.stores.store import Changed, Store
from tests.waiting import wait_for


@pytest.fixture
def store(tmp_path):
    return Store(f"file://{tmp_path}/store")


@pytest.fixture
def locks(store):
    """From a folder's id to a lock that is quick about it; all are given up at the end."""
    made, said = [], []

    def make(here, **times):
        made.append(Lock(store, here, said.append, **{"beat_s": 0.05, "dead_s": 1000.0, **times}))
        return made[-1], said
    yield make
    for lock in made:
        lock.release()


def test_who_comes_second_is_refused_while_the_first_lives(locks):
    first, _ = locks("a")
    first.take()
    second, said = locks("b")
    with pytest.raises(UserError, match=r"is in use: process \d+ on .* copies checkpoints there"):
        second.take()
    assert len(said) == 1 and "waiting up to 1000 s" in said[0] and not first.lost


def test_who_gives_no_sign_of_life_gives_way_and_hears_of_it(locks, store):
    dead, _ = locks("a", beat_s=1000.0)
    dead.take()
    second, said = locks("b", dead_s=0.1)
    second.take()
    assert "took over" in said[-1] and json.loads(store.read(LOCK))["here"] == "b"
    dead.beat_s = 0.01
    threading.Thread(target=dead._renew, daemon=True).start()
    wait_for(lambda: dead.lost)
    assert not second.lost
    dead.release()
    assert store.head(LOCK) is not None, "one that is lost is not removed"


@pytest.mark.parametrize("slow", [1, 2, 3])
def test_while_the_store_does_not_answer_nobody_is_thought_dead(locks, monkeypatch, slow):
    """The read number `slow` takes as long as it takes a lock to count as dead; the holder renews after that."""
    first, _ = locks("a", beat_s=1000.0)
    first.take()
    second, _ = locks("b", beat_s=2.0, dead_s=75.0)
    clock, reads, read = [1000.0], [], second._read

    def stumbling():
        reads.append(clock[0])
        clock[0] += 80.0 if len(reads) == slow else 0.0
        if len(reads) == slow + 15:
            assert first._put(first._etag)
        return read()

    def sleep(seconds):
        clock[0] += seconds
    with monkeypatch.context() as patch:
        patch.setattr(second, "_read", stumbling)
        patch.setattr(claim, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
        with pytest.raises(UserError, match="is in use"):
            second.take()
    assert first.held()


def test_who_stood_still_hears_of_it_by_looking(locks, store):
    dead, _ = locks("a", beat_s=1000.0)
    dead.take()
    assert dead.held()
    second, _ = locks("b", dead_s=0.1)
    second.take()
    assert not dead.lost and not dead.held() and "took over file://" in dead.lost
    assert second.held()
    store.delete([LOCK])
    removed, _ = locks("c", beat_s=1000.0)
    removed.take()
    store.delete([LOCK])
    assert not removed.held() and "was removed" in removed.lost


def test_a_beat_whose_answer_was_lost_does_not_give_the_lock_up(locks, store):
    lock, _ = locks("a", beat_s=1000.0)
    lock.take()
    before = store.put(LOCK, store.read(LOCK) + b"\n", replaces=lock._etag).etag  # as an earlier beat of it
    lock.beat_s = 0.01
    threading.Thread(target=lock._renew, daemon=True).start()
    wait_for(lambda: store.head(LOCK).etag != before)
    assert not lock.lost and lock.held()


def test_an_earlier_process_of_the_same_folder_is_not_waited_for(locks, store):
    locks("a", beat_s=1000.0)[0].take()
    again, said = locks("a")
    again.take()
    assert not said
    again.release()
    assert store.head(LOCK) is None


@pytest.mark.parametrize("of", ["seaweed", "moto_server", "google", "azurite"])
def test_of_many_who_come_at_once_one_gets_it(of, request):
    bucket = request.getfixturevalue(of)
    made = [Lock(Store(bucket.url), str(number), lambda text: None, beat_s=0.2) for number in range(6)]
    taken, refused = [], []

    def take(lock):
        try:
            lock.take()
            taken.append(lock)
        except UserError as error:
            refused.append(str(error))
    threads = [threading.Thread(target=take, args=(lock,)) for lock in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == 1 and len(refused) == 5 and not taken[0].lost
    taken[0].release()
    assert Store(bucket.url).head(LOCK) is None


@pytest.mark.parametrize("of", ["moto_server", "google", "azurite"])
def test_a_store_that_stumbles_does_not_take_the_lock_away(of, request):
    bucket = request.getfixturevalue(of)
    lock = Lock(Store(bucket.url), "a", lambda text: None, beat_s=0.05)
    lock.take()
    before = Store(bucket.url).head(LOCK).etag
    refused = bucket.fail("refuse", 3, method="PUT", path=LOCK)
    cut = bucket.fail("error", 3, method="PUT", path=LOCK)
    wait_for(lambda: refused.met == 3 and cut.met == 3)
    now = Store(bucket.url).head(LOCK).etag
    wait_for(lambda: Store(bucket.url).head(LOCK).etag not in (before, now))
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
