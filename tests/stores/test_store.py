"""What every store does, on a disk, in memory and at servers of each cloud."""

import errno
import fcntl
import hashlib
import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from drover.pipeline.errors import UserError
from drover.pipeline.stores.store import Changed, Exists, Missing, Store, is_url, preflight
from tests.refusal import refused


def test_what_is_a_url():
    assert is_url("s3://bucket/a") and is_url("hf://datasets/x") and is_url("file:///a")
    assert not any(map(is_url, ("/a/b", "a:b", "texts/*.txt", "C:/a", "://a", "~/x")))


def test_objects_are_listed_in_the_order_of_their_paths_read_replaced_and_deleted(store, tmp_path):
    preflight(store)
    assert list(store.list()) == [], "a sound store is left as it was"
    paths = ["empty", "b", "a/x", "a-b/y", "a.c", "a/b/c", "ü %20+é.txt", "a/zwei"]
    for number, path in enumerate(paths):
        written = store.put(path, bytes([number]) * number)
        assert (written.path, written.size) == (path, number)
    entries = list(store.list())
    assert [(entry.path, entry.size) for entry in entries] == [(path, paths.index(path)) for path in sorted(paths)]
    assert [entry.path for entry in store.list("a")] == ["a/b/c", "a/x", "a/zwei"]
    assert [entry.path for entry in store.join("a").list()] == ["b/c", "x", "zwei"]
    assert list(store.list("nothing/here")) == []
    for entry in entries:
        data = bytes([entry.size]) * entry.size
        assert store.head(entry.path) == entry and entry.etag and entry.modified > 1e9
        assert store.read(entry.path, etag=entry.etag) == store.stream(entry.path, entry=entry).read() == data
        assert store.fetch(entry.path, tmp_path / "x") == hashlib.sha256(data).hexdigest()
    assert store.head("a/x/nothing") is None and store.head("a") is None
    [etag] = [entry.etag for entry in entries if entry.path == "b"]
    assert store.put("b", b"56789", replaces=etag).size == 5
    store.delete(["b", "nothing", "a/b/c"])
    store.delete([])
    store.delete(["nothing"])
    assert [entry.path for entry in store.list()] == sorted({*paths} - {"b", "a/b/c"})


def test_ranges_are_read_exactly_or_not_at_all(store):
    store.put("data", bytes(range(200)))
    assert store.read("data", 10, 20) == bytes(range(10, 20))
    assert store.read("data", 150) == bytes(range(150, 200)) and store.read("data", 7, 7) == b""
    refused(UserError, "10 bytes from 195 on, got 5", store.read, "data", 195, 205)
    with pytest.raises(UserError):
        store.read("data", 300, 310)
    refused(Missing, "nix", store.read, "nix")
    with pytest.raises(Changed):
        store.read("data", 0, 5, etag='"another"')


def test_large_objects_are_written_in_parts_streamed_and_fetched(store, big, tmp_path):
    file, target, digest = tmp_path / "big", tmp_path / "new" / "copy", hashlib.sha256(big)
    file.write_bytes(big)
    entry = store.put("big", file)
    assert entry.size == len(big) == store.head("big").size
    with store.stream("big", len(big) - 100, entry=entry) as stream:
        assert (stream.read(10), stream.read()) == (big[-100:-90], big[-90:])
    with store.stream("big") as stream:  # not read to its end
        assert stream.read(3) == big[:3]
    with store.stream("big") as stream:
        assert hashlib.sha256(stream.read()).digest() == digest.digest()
    assert store.read("big", 5, len(big) - 5) == big[5:-5]
    assert store.fetch("big", target) == digest.hexdigest()
    assert target.read_bytes() == big and [path.name for path in target.parent.iterdir()] == ["copy"]


def test_conditions_are_kept(store, tmp_path):
    first = store.put("lock", b"1", only_new=True)
    with pytest.raises(Exists):
        store.put("lock", b"2", only_new=True)
    second = store.put("lock", b"22", replaces=first.etag)
    for path in ("lock", "absent"):
        with pytest.raises(Changed):
            store.put(path, b"3", replaces=first.etag)
    assert store.read("lock") == b"22" and store.head("lock").etag == second.etag != first.etag
    (tmp_path / "data").write_bytes(b"from a file")
    assert store.put("other", tmp_path / "data", only_new=True).size == 11
    with pytest.raises(Changed):
        store.stream("lock", entry=first).read()


def test_of_many_who_write_on_condition_one_does(store):
    def at_once(text, **condition):
        barrier = threading.Barrier(6)

        def attempt(number):
            barrier.wait()
            try:
                store.put("one", text % number, **condition)
            except (Exists, Changed):
                return []
            return [text % number]
        with ThreadPoolExecutor(6) as pool:
            [won] = [text for texts in pool.map(attempt, range(6)) for text in texts]
        assert store.read("one") == won
    at_once(b"%d", only_new=True)
    at_once(b"new %d", replaces=store.head("one").etag)


def test_a_store_is_its_url_in_every_process(tmp_path):
    store = Store(f"file://{tmp_path}/p/")
    store.put("x", b"12")
    assert pickle.loads(pickle.dumps(store)) == store and pickle.loads(pickle.dumps(store)).read("x") == b"12"


def test_a_file_is_replaced_where_only_what_is_open_for_writing_can_be_locked(tmp_path, monkeypatch):
    """As on NFS."""
    flock, store = fcntl.flock, Store(f"file://{tmp_path}")

    def of_nfs(file, operation):
        if operation & fcntl.LOCK_EX and fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flock(file, operation)
    monkeypatch.setattr("fcntl.flock", of_nfs)
    first = store.put("lock", b"1")
    assert store.put("lock", b"22", replaces=first.etag).size == 2 and store.read("lock") == b"22"
    refused(UserError, "write failed", Store(f"file://{tmp_path}/lock").put, "x", b"1")
