"""pipeline.stores on a real object store, on one that fails, on a disk and in memory."""

import errno
import fcntl
import hashlib
import os
import pickle
import subprocess
import sys
import threading

import pytest

from pipeline.errors import UserError
from pipeline.stores import clouds
from pipeline.stores.store import Changed, Exists, Missing, Store, is_url, preflight
from tests.conftest import environment


def test_what_is_a_url():
    assert is_url("s3://bucket/a") and is_url("hf://datasets/x") and is_url("file:///a")
    assert not any(map(is_url, ("/a/b", "a:b", "texts/*.txt", "C:/a", "://a", "~/x")))


def test_objects_are_listed_in_the_order_of_their_paths_and_read_back(store):
    paths = ["b", "a/x", "a-b/y", "a.c", "a/b/c", "ü %20+é.txt", "a/zwei"]
    for number, path in enumerate(paths):
        written = store.put(path, bytes([number]) * number)
        assert (written.path, written.size) == (path, number)
    entries = list(store.list())
    assert [entry.path for entry in entries] == sorted(paths)
    assert [entry.size for entry in entries] == [paths.index(entry.path) for entry in entries]
    assert [entry.path for entry in store.list("a")] == ["a/b/c", "a/x", "a/zwei"]
    assert [entry.path for entry in store.join("a").list()] == ["b/c", "x", "zwei"]
    assert list(store.list("nothing/here")) == []
    for entry in entries:
        assert store.head(entry.path) == entry and entry.etag and entry.modified > 1e9
        assert store.read(entry.path) == bytes([entry.size]) * entry.size
    assert store.head("a/x/nothing") is None and store.head("a") is None


def test_ranges_are_read_exactly_or_not_at_all(store):
    store.put("data", bytes(range(200)))
    assert store.read("data", 10, 20) == bytes(range(10, 20))
    assert store.read("data", 150) == bytes(range(150, 200)) and store.read("data", 7, 7) == b""
    with pytest.raises(UserError, match="10 bytes from 195 on, got 5"):
        store.read("data", 195, 205)
    with pytest.raises(UserError):
        store.read("data", 300, 310)
    with pytest.raises(Missing, match="nix"):
        store.read("nix")
    with pytest.raises(Changed):
        store.read("data", 0, 5, etag='"another"')


def test_large_objects_are_written_in_parts_streamed_and_fetched(store, big, tmp_path):
    file = tmp_path / "big"
    file.write_bytes(big)
    entry = store.put("big", file)
    assert entry.size == len(big) == store.head("big").size
    with store.stream("big") as stream:
        assert hashlib.sha256(stream.read()).digest() == hashlib.sha256(big).digest()
    with store.stream("big", len(big) - 100, entry=entry) as stream:
        assert (stream.read(10), stream.read()) == (big[-100:-90], big[-90:])
    with store.stream("big") as stream:  # not read to its end
        assert stream.read(3) == big[:3]
    assert store.read("big", 5, len(big) - 5) == big[5:-5]
    target = tmp_path / "new" / "copy"
    assert store.fetch("big", target) == hashlib.sha256(big).hexdigest()
    assert target.read_bytes() == big and [path.name for path in target.parent.iterdir()] == ["copy"]


def test_an_empty_object_is_one(store, tmp_path):
    assert store.put("empty", b"").size == 0
    assert store.read("empty") == b"" and store.stream("empty").read() == b""
    assert store.fetch("empty", tmp_path / "e") == hashlib.sha256(b"").hexdigest()
    assert [entry.path for entry in store.list()] == ["empty"]


def test_conditions_are_kept(store, tmp_path):
    first = store.put("lock", b"1", only_new=True)
    with pytest.raises(Exists):
        store.put("lock", b"2", only_new=True)
    second = store.put("lock", b"22", replaces=first.etag)
    with pytest.raises(Changed):
        store.put("lock", b"3", replaces=first.etag)
    with pytest.raises(Changed):
        store.put("absent", b"3", replaces=first.etag)
    assert store.read("lock") == b"22" and store.head("lock").etag == second.etag != first.etag
    (tmp_path / "data").write_bytes(b"from a file")
    assert store.put("other", tmp_path / "data", only_new=True).size == 11
    with pytest.raises(Changed):
        store.stream("lock", entry=first).read()


def test_of_many_who_write_on_condition_one_does(store):
    def at_once(write):
        won, barrier = [], threading.Barrier(6)

        def attempt(number):
            barrier.wait()
            try:
                write(number)
            except (Exists, Changed):
                return
            won.append(number)
        threads = [threading.Thread(target=attempt, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return won
    won = at_once(lambda number: store.put("one", b"%d" % number, only_new=True))
    assert len(won) == 1 and store.read("one") == b"%d" % won[0]
    etag = store.head("one").etag
    won = at_once(lambda number: store.put("one", b"new %d" % number, replaces=etag))
    assert len(won) == 1 and store.read("one") == b"new %d" % won[0]


def test_objects_are_deleted_and_those_that_are_not_there_are_no_error(store):
    for path in ("a", "b/c", "d"):
        store.put(path, b"x")
    store.delete(["a", "nothing", "b/c"])
    assert [entry.path for entry in store.list()] == ["d"]
    store.delete([])
    store.delete(["nothing"])


def test_a_sound_store_passes_and_is_left_as_it_was(store):
    preflight(store)
    assert list(store.list()) == []


def test_a_store_is_its_url_in_every_process(seaweed):
    store = Store(seaweed.url_of("p"))
    store.put("x", b"12")
    assert pickle.loads(pickle.dumps(store)) == store and pickle.loads(pickle.dumps(store)).read("x") == b"12"
    code = f"from pipeline.stores.store import Store; print(Store({store.url!r}).read('x'))"
    other = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    assert other.stdout == "b'12'\n"


def test_what_is_listed_can_be_read_as_it_was_listed(failing):
    """Azure gives ETags with quotation marks, and lists them without."""
    store = Store(failing.url)
    store.put("a/b", b"1234")
    [entry] = store.list("a")
    assert entry == store.head("a/b") and store.read("a/b", 1, 3, etag=entry.etag) == b"23"
    assert store.stream("a/b", entry=entry).read() == b"1234"
    assert store.put("a/b", b"56789", replaces=entry.etag).size == 5


def test_google_is_given_the_generation_of_what_is_replaced(monkeypatch):
    import obstore
    there, modes = {"e_tag": '"a"', "version": "1700"}, []

    def head(client, key):
        if key == "gone":
            raise FileNotFoundError(key)
        return there

    def put(client, key, data, *, mode, **more):
        modes.append(mode)
        return {"e_tag": '"b"', "version": "1701"}
    monkeypatch.setattr(obstore, "head", head)
    monkeypatch.setattr(obstore, "put", put)
    monkeypatch.setattr(clouds, "client", lambda root: None)
    google = clouds.Cloud("gs://bucket")
    assert google.put("x", b"1", False, '"a"') == '"b"'
    google.put("x", b"1", True, None)
    google.put("x", b"1", False, None)
    clouds.Cloud("s3://bucket").put("x", b"1", False, '"z"')
    wanted = [{"e_tag": '"a"', "version": "1700"}, "create", None, {"e_tag": '"z"'}]
    assert modes == wanted
    for key, etag in (("x", '"z"'), ("gone", '"a"')):
        with pytest.raises(Changed, match=f"gs://bucket/{key} "):
            google.put(key, b"1", False, etag)
    assert modes == wanted


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


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(UserError, match="write failed"):
        Store(f"file://{tmp_path}/file").put("x", b"1")
