"""Servers that fail, hang, break off or do not keep what they promise."""

import hashlib

import pytest

from drover.pipeline.core.errors import UserError
from drover.pipeline.storage import clouds
from drover.pipeline.storage.clouds import Cloud
from drover.pipeline.storage.store import Store, preflight
from tests.refusal import refused


@pytest.mark.parametrize("kind", ["error", "slow down", "too many"])
def test_a_server_that_is_overloaded_for_a_while_is_asked_again(failing, kind):
    store = Store(failing.url)
    store.put("a/b", b"1234")
    fault = failing.fail(kind, times=0)
    for call, expected in ((lambda: store.read("a/b"), b"1234"), (lambda: len(list(store.list())), 1),
                           (lambda: store.put("c", b"12").size, 2), (lambda: store.read("c"), b"12")):
        fault.times += 3
        assert call() == expected and fault.met == fault.times
    fault.times = 10_000
    refused(UserError, rf"{failing.url}/403/credentials: read failed.*(500|SlowDown)", store.read, "403/credentials")


def test_a_part_that_fails_is_sent_again_and_a_body_that_breaks_off_is_read_on(failing, big, tmp_path):
    store, file, digest = Store(failing.url), tmp_path / "big", hashlib.sha256(big).hexdigest()
    file.write_bytes(big)
    faults = [failing.fail("error", times=2, method="PUT", path="big", after=1)]
    store.put("big", file)
    assert len([path for method, path, _ in failing.seen if method == "PUT"]) >= 5  # 3 parts
    faults.append(failing.fail("cut", times=3, method="GET", path="big"))
    assert store.fetch("big", tmp_path / "copy") == digest
    faults.append(failing.fail("cut", times=2, method="GET", path="big"))
    assert hashlib.sha256(store.stream("big").read()).hexdigest() == digest
    assert [fault.met for fault in faults] == [2, 3, 2]


@pytest.mark.parametrize("kind", ["cut", "truncate", "error", "refuse"])
def test_what_did_not_come_whole_never_becomes_a_file(failing, big, tmp_path, kind):
    store, target = Store(failing.url), tmp_path / "big"
    store.put("big", big)
    fault = failing.fail(kind, times=10_000, method="GET", path="big", after=1)
    for call in (lambda: store.fetch("big", target), lambda: store.stream("big").read(), lambda: store.read("big")):
        refused(UserError, f"{failing.url}/big", call)
    assert fault.met and list(tmp_path.iterdir()) == []


def test_a_late_answer_is_waited_for_and_a_server_that_hangs_is_given_up(failing, monkeypatch):
    store = Store(failing.url)
    store.put("x", b"123")
    fault = failing.fail("delay", times=1, method="GET", path="x", seconds=0.5)
    assert store.read("x") == b"123" and fault.met == 1
    monkeypatch.setattr("drover.pipeline.storage.clouds.REQUEST_S", 0.3)
    monkeypatch.setattr("drover.pipeline.storage.clouds.RETRIES", 1)
    clouds._opened.cache_clear()
    failing.fail("delay", times=10, method="GET", path="x", seconds=3)
    refused(UserError, "read failed", store.read, "x")


@pytest.mark.parametrize("spoil, says", [
    (lambda data, only_new: (b"10\r\n" + data, only_new), "70,001 bytes were written, and 70,005"),
    (lambda data, only_new: (data, False), "only if new")])
def test_a_server_that_does_not_keep_its_promises_is_found_out(moto_server, monkeypatch, spoil, says):
    put = Cloud.put
    monkeypatch.setattr(Cloud, "put", lambda self, key, *arguments: put(self, key, *spoil(*arguments)))
    refused(UserError, says, preflight, Store(moto_server.url))
