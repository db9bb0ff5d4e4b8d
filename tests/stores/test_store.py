"""pipeline.stores on a real object store, on one that fails, on a disk and in memory."""

import errno
import fcntl
import hashlib
import os
import pickle
import re
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from pipeline.errors import UserError
from pipeline.stores import clouds
from pipeline.stores import store as stores
from pipeline.stores.store import Changed, Exists, Missing, Store, is_url, preflight
from tests.conftest import environment
from tests.object_store import SECRET

BIG = 2 * stores.BLOCK_BYTES + 12_345
"""More than two of the blocks in which objects are read, and than one part of an upload."""


@pytest.fixture(params=["seaweed", "moto_server", "google", "azurite", "file", "memory"])
def store(request, tmp_path):
    if request.param == "file":
        return Store(f"file://{tmp_path}/deep/er")
    if request.param == "memory":
        return Store(f"memory://{tmp_path.name}")
    return Store(request.getfixturevalue(request.param).url_of("some/prefix"))


@pytest.fixture(params=["seaweed", "google", "azurite"])
def checking(request):
    """A bucket at a server that compares signatures."""
    return request.getfixturevalue(request.param)


@pytest.fixture(params=["moto_server", "google", "azurite"])
def failing(request):
    """A bucket at a server that fails on request."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def big():
    return os.urandom(1 << 20) * (BIG >> 20) + os.urandom(BIG & 0xfffff)


def test_what_is_a_url():
    assert is_url("s3://bucket/a") and is_url("hf://datasets/x") and is_url("file:///a")
    assert not any(map(is_url, ("/a/b", "a:b", "texts/*.txt", "C:/a", "://a", "~/x")))


@pytest.mark.parametrize("url, says", [
    ("hdfs://a/b", "s3://, gs://, az://"), ("s3:///prefix", "names no bucket"), ("a/b", "cannot be opened"),
    ("file://etc/x", "another machine")])
def test_urls_that_cannot_be_opened_are_refused_plainly(url, says):
    with pytest.raises(UserError, match=says):
        Store(url)


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


@pytest.mark.parametrize("call", [lambda store: list(store.list()), lambda store: store.head("x"),
                                  lambda store: store.read("x"), lambda store: store.put("x", b"1"),
                                  lambda store: store.delete(["x"]), preflight], ids=range(6))
def test_a_wrong_secret_is_told_with_the_url_and_without_the_secret(checking, monkeypatch, call):
    store = Store(checking.url)
    store.put("x", b"1")
    name, wrong = checking.key
    monkeypatch.setenv(name, wrong)
    with pytest.raises(UserError, match=f"{checking.url}.*refused.*{name}") as error:
        call(store)
    assert SECRET not in str(error.value) and wrong not in str(error.value) and "\n" not in str(error.value)


def test_a_bucket_that_is_not_there_is_named(checking):
    store = Store(f"{checking.scheme}://no-such-bucket/x")
    for call in (lambda: list(store.list()), lambda: store.put("a", b"1"), lambda: store.read("a"),
                 lambda: store.put("a", b"1", only_new=True), lambda: preflight(store)):
        with pytest.raises(UserError, match=rf"no (bucket|container) {checking.scheme}://no-such-bucket .*"
                                            rf"\({'.*' * (checking.scheme == 'az')}{checking.address}\)") as error:
            call()
        assert not isinstance(error.value, Missing)


def test_a_store_that_cannot_be_reached_is_told(failing, monkeypatch):
    monkeypatch.setenv(failing.address, "http://127.0.0.1:1")
    monkeypatch.setattr("pipeline.stores.clouds.RETRIES", 2)
    with pytest.raises(UserError, match=rf"{failing.url}.*failed.*can be reached.*{failing.address}"):
        list(Store(failing.url).list())


@pytest.mark.parametrize("url, names", [("s3://bucket", "AWS_ACCESS_KEY_ID"), ("az://box", "AZURE_STORAGE_ACCOUNT_KEY"),
                                        ("gs://bucket", "GOOGLE_APPLICATION_CREDENTIALS")])
def test_it_is_told_how_keys_are_set_where_neither_the_environment_nor_the_machine_has_some(url, names):
    asked = "Error performing token request: Error performing GET http://169.254.169.254/x in 2s - HTTP error: timeout"
    error = clouds.Cloud._failed(SimpleNamespace(_kind=clouds._kind(url)), f"{url}/x", "read", asked)
    assert re.fullmatch(rf"{url}/x: read was refused: the environment has no keys.*Set .*{names}.*\.", str(error))


def test_azures_keys_are_taken_by_the_names_of_its_own_program(azurite, monkeypatch):
    for name in ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY"):
        monkeypatch.setenv(name.replace("_ACCOUNT_NAME", "_ACCOUNT").replace("_ACCOUNT_KEY", "_KEY"), os.environ[name])
        monkeypatch.delenv(name)
    for scheme in ("az", "abfs", "abfss"):
        assert Store(f"{scheme}://{azurite.name}").put(scheme, b"1").size == 1
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "another")
    assert Store(f"abfss://{azurite.name}@drover.dfs.core.windows.net").put("by name", b"1").size == 1
    assert len(list(Store(f"abfss://{azurite.name}@drover.dfs.core.windows.net").list())) == 4
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT")
    with pytest.raises(UserError, match=r"Account must be specified.*AZURE_STORAGE_ACCOUNT_NAME"):
        Store(azurite.url).head("az")


def test_what_is_listed_can_be_read_as_it_was_listed(failing):
    """Azure gives ETags with quotation marks, and lists them without."""
    store = Store(failing.url)
    store.put("a/b", b"1234")
    [entry] = store.list("a")
    assert entry == store.head("a/b") and store.read("a/b", 1, 3, etag=entry.etag) == b"23"
    assert store.stream("a/b", entry=entry).read() == b"1234"
    assert store.put("a/b", b"56789", replaces=entry.etag).size == 5


def test_a_file_of_googles_keys_that_cannot_be_used_is_named(google, monkeypatch, tmp_path):
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "absent.json"))
    with pytest.raises(UserError, match=rf"{google.url} cannot be opened.*{tmp_path}/absent\.json.*GOOGLE_APPL"):
        Store(google.url).head("x")


def test_keys_are_taken_from_the_files_of_other_programs(seaweed, monkeypatch, tmp_path):
    files = {"AWS_SHARED_CREDENTIALS_FILE": "[default]\naws_access_key_id=x\naws_secret_access_key=y\n[mine]\n"
             f"aws_access_key_id = {os.environ['AWS_ACCESS_KEY_ID']}\naws_secret_access_key = {SECRET}\n",
             "AWS_CONFIG_FILE": "[profile mine]\nregion = us-east-1\n"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        monkeypatch.setenv(name, str(tmp_path / name))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_PROFILE", "mine")
    assert Store(seaweed.url).put("x", b"1").size == 1


def test_keys_that_are_renewed_in_a_file_are_taken(monkeypatch, tmp_path):
    file = tmp_path / "credentials"
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "absent"))

    def key(number):
        """The key in the file's next version, whose time does not depend on how fine the disk's times are."""
        file.write_text(f"[default]\naws_access_key_id = key-{number}\naws_secret_access_key = x\n")
        os.utime(file, ns=(number, number))
        return clouds.client("s3://bucket").config["access_key_id"]
    assert [key(1), key(2)] == ["key-1", "key-2"]
    assert clouds.client("s3://bucket") is clouds.client("s3://bucket")


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


def test_without_obstore_it_is_told_what_to_install(monkeypatch, tmp_path):
    clouds._opened.cache_clear()
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(UserError, match=r"pip install --editable '\.\[objects\]'"):
        list(Store("s3://bucket/x").list())
    folder = Store(f"file://{tmp_path}")
    folder.put("a/b", b"1")
    assert folder.read("a/b") == b"1"


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(UserError, match="write failed"):
        Store(f"file://{tmp_path}/file").put("x", b"1")
