"""Servers that fail, hang, break off or do not keep what they promise."""

import hashlib

import pytest

from pipeline.errors import UserError
from pipeline.stores import store as stores
from pipeline.stores.store import Changed, Store, preflight


@pytest.mark.parametrize("kind", ["error", "slow down", "too many"])
def test_a_server_that_is_overloaded_for_a_while_is_asked_again(failing, kind):
    store = Store(failing.url)
    store.put("a/b", b"1234")
    fault = failing.fail(kind, times=3)
    assert store.read("a/b") == b"1234"
    fault.times = fault.met + 3
    assert [entry.path for entry in store.list()] == ["a/b"]
    fault.times = fault.met + 3
    assert store.put("c", b"12").size == 2 and store.read("c") == b"12"
    assert fault.met == 9
    fault.times = 10_000
    with pytest.raises(UserError, match=rf"{failing.url}/a/b: read failed.*(500|SlowDown)"):
        store.read("a/b")


def test_a_part_that_fails_is_sent_again(failing, big, tmp_path):
    store, file = Store(failing.url), tmp_path / "big"
    file.write_bytes(big)
    fault = failing.fail("error", times=2, method="PUT", path="big", after=1)
    store.put("big", file)
    assert fault.met == 2 and len([path for method, path, _ in failing.seen if method == "PUT"]) >= 5  # 3 parts
    assert store.fetch("big", tmp_path / "copy") == hashlib.sha256(big).hexdigest()


def test_a_body_that_breaks_off_is_read_on(failing, big, tmp_path):
    store = Store(failing.url)
    store.put("big", big)
    fault = failing.fail("cut", times=3, method="GET", path="big")
    assert store.fetch("big", tmp_path / "big") == hashlib.sha256(big).hexdigest()
    assert fault.met == 3
    again = failing.fail("cut", times=2, method="GET", path="big")
    assert store.stream("big").read() == big and again.met == 2


def test_a_listing_that_breaks_off_is_begun_again_and_that_is_said(failing, capfd):
    store = Store(failing.url)
    for number in range(5):
        store.put(f"x{number}", b"1")
    failing.fail("cut", times=1, method="GET", path=failing.listing)
    assert len(list(store.list())) == 5
    assert "Listing again" in capfd.readouterr().out
    failing.fail("cut", times=10, method="GET", path=failing.listing)
    with pytest.raises(UserError, match="list failed"):
        list(store.list())


@pytest.mark.parametrize("kind", ["cut", "truncate", "error", "refuse"])
def test_what_did_not_come_whole_never_becomes_a_file(failing, big, tmp_path, kind):
    store, target = Store(failing.url), tmp_path / "big"
    store.put("big", big)
    fault = failing.fail(kind, times=10_000, method="GET", path="big", after=1)
    with pytest.raises(UserError, match=f"{failing.url}/big"):
        store.fetch("big", target)
    assert fault.met and list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match=f"{failing.url}/big"):
        store.stream("big").read()
    with pytest.raises(UserError, match=f"{failing.url}/big"):
        store.read("big")
    fault.times = fault.met
    assert store.fetch("big", target) == hashlib.sha256(big).hexdigest()


def test_a_server_that_hangs_is_given_up_and_told(failing, monkeypatch):
    store = Store(failing.url)
    store.put("x", b"123")
    monkeypatch.setattr("pipeline.stores.clouds.REQUEST_S", 0.3)
    monkeypatch.setattr("pipeline.stores.clouds.RETRIES", 1)
    failing.fail("delay", times=10, method="GET", path="x", seconds=3)
    with pytest.raises(UserError, match="read failed"):
        store.read("x")


def test_a_late_answer_is_waited_for(failing):
    store = Store(failing.url)
    store.put("x", b"123")
    fault = failing.fail("delay", times=1, method="GET", path="x", seconds=0.5)
    assert store.read("x") == b"123" and fault.met == 1


def test_an_object_that_is_replaced_while_it_is_read_is_refused(store, big, tmp_path, monkeypatch):
    monkeypatch.setattr(stores, "AHEAD", 1)
    store.put("big", big)
    stream = store.stream("big")
    stream.read(10)
    store.put("big", big[::-1])
    with pytest.raises(Changed, match="big"):
        stream.read()
    read = Store.read

    def replacing(self, path, start=0, stop=None, **more):
        data = read(self, path, start, stop, **more)
        if start == 0:
            store.put("big", big)
        return data
    monkeypatch.setattr(Store, "read", replacing)
    with pytest.raises(Changed, match="big"):
        store.fetch("big", tmp_path / "target")
    assert not (tmp_path / "target").exists()


def test_a_server_that_keeps_something_else_is_found_out(moto_server, monkeypatch):
    from pipeline.stores.clouds import Cloud
    put = Cloud.put
    monkeypatch.setattr(Cloud, "put", lambda self, key, data, *rest: put(self, key, b"10\r\n" + data, *rest))
    with pytest.raises(UserError, match="70,001 bytes were written, and 70,005 are there"):
        preflight(Store(moto_server.url))


@pytest.mark.parametrize("argument, says", [("only_new", "only if new"), ("replaces", "not the one to be replaced")])
def test_a_server_that_writes_in_spite_of_a_condition_is_found_out(moto_server, monkeypatch, argument, says):
    from pipeline.stores.clouds import Cloud
    put = Cloud.put

    def careless(self, key, data, only_new, replaces):
        return put(self, key, data, only_new and argument != "only_new", None if argument == "replaces" else replaces)
    monkeypatch.setattr(Cloud, "put", careless)
    with pytest.raises(UserError, match=says):
        preflight(Store(moto_server.url))
    assert list(Store(moto_server.url).list()) == []
