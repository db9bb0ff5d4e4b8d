"""The node's cache: verified, within its bound, fetched once, whatever else happens on the disk."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pipeline.data.stored.figures import Figures
from pipeline.data.stored.node_cache import Closed, NodeCache
from pipeline.errors import UserError
from tests.conftest import REPOSITORY
from tests.waiting import wait_for

SIZE = 5000


class Source:
    """Things to fetch, of SIZE bytes each, and how often each was asked for."""

    def __init__(self, count=8):
        self.content = {hashlib.sha256(data).hexdigest(): data for data in
                        (bytes([number]) * SIZE for number in range(count))}
        self.names, self.asked = list(self.content), []

    def reader(self, number):
        def read(start):
            self.asked.append(number)
            return io.BytesIO(self.content[self.names[number]][start:])
        return read


class Cache(NodeCache):
    """One with room for so many of them, that keeps what it says."""

    def __init__(self, folder, source, things=100.0):
        self.told, self.source = [], source
        super().__init__(folder, int(things * SIZE), Figures(), self.told.append)

    def get(self, number, ahead=False):
        """The content; None where there is no room."""
        found = self.open(f"thing {number}", self.source.names[number], SIZE, self.source.reader(number), ahead=ahead)
        if found is None:
            return None
        try:
            return os.pread(found, 2 * SIZE, 0)
        finally:
            os.close(found)

    def there(self):
        """Numbers of the things in the folder."""
        return {self.source.names.index(path.stem) for path in self.folder.glob("*.arrow")}


    def bytes(self):
        """Of all things in the folder, those that are being fetched with them."""
        return sum(path.stat().st_size for path in self.folder.iterdir() if path.suffix in (".arrow", ".tmp"))


@pytest.fixture
def source():
    return Source()


def test_what_was_fetched_is_found_also_by_the_next_process(tmp_path, source):
    cache = Cache(tmp_path, source)
    assert cache.get(1) == cache.get(1) == bytes([1]) * SIZE
    later = Cache(tmp_path, source)
    assert later.get(1) == bytes([1]) * SIZE and source.asked == [1]
    assert (cache.figures.fetched, cache.figures.hits, later.figures.hits) == (1, 1, 1)
    assert cache.folder.stat().st_mode & 0o777 == 0o700


def test_the_bound_holds_and_the_longest_unused_goes(tmp_path, source):
    cache = Cache(tmp_path, source, things=3)
    first = cache.open("thing 0", source.names[0], SIZE, source.reader(0))
    for number in (1, 2, 0, 3, 4):
        assert cache.get(number) == bytes([number]) * SIZE
        assert cache.bytes() <= 3 * SIZE
    assert cache.there() == {0, 3, 4} and cache.figures.removed == 2  # 0 was used after 1 and 2
    assert cache.get(5) is not None and cache.get(6) is not None and 0 not in cache.there()
    assert os.pread(first, SIZE, 0) == bytes(SIZE)  # who reads it reads on
    os.close(first)


def test_while_there_is_room_nothing_is_counted_and_where_it_is_short_what_went_is_found(tmp_path, source, monkeypatch):
    one, other, scandir, scans = Cache(tmp_path, source, 4), Cache(tmp_path, source, 4), os.scandir, []
    monkeypatch.setattr("os.scandir", lambda folder: scans.append(folder) or scandir(folder))
    for number, cache in enumerate((one, other, one)):
        assert cache.get(number) is not None
    assert not scans
    for number in (0, 1, 2):  # by somebody else
        (one.folder / f"{source.names[number]}.arrow").unlink()
    for number in (3, 4, 5, 6):
        assert other.get(number) is not None
    assert scans and one.there() == {3, 4, 5, 6} and other.figures.removed == 0
    assert one.get(7) is not None and one.bytes() == 4 * SIZE and one.figures.removed == 1


@pytest.mark.parametrize("noted", [b"", b"12", b"x" * 20, b"0" * 21])
def test_where_no_number_is_noted_things_are_counted(tmp_path, source, noted):
    cache = Cache(tmp_path, source, things=2)
    for number in (0, 1):
        cache.get(number)
    (cache.folder / "lock-room").write_bytes(noted)
    assert cache.get(2) is not None and cache.there() == {1, 2}


def test_a_number_that_cannot_be_noted_is_not_believed(tmp_path, source, monkeypatch):
    cache, pwrite = Cache(tmp_path, source, things=2), os.pwrite

    def full(descriptor, data, at):
        if len(data) == 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(descriptor, data, at)
    monkeypatch.setattr("os.pwrite", full)
    for number in (0, 1, 2, 3):
        assert cache.get(number) is not None and cache.bytes() <= 2 * SIZE
    assert cache.there() == {2, 3}


def test_what_others_remove_while_it_is_counted_is_passed_over(tmp_path, source, monkeypatch):
    cache, scandir = Cache(tmp_path, source, things=2), os.scandir
    cache.get(0)
    cache.get(1)

    def scanned_before_it_went(folder):
        entries = list(scandir(folder))
        (cache.folder / f"{source.names[0]}.arrow").unlink(missing_ok=True)
        return entries
    with monkeypatch.context() as patch:
        patch.setattr("os.scandir", scanned_before_it_went)
        patch.setattr(cache, "_wanted_digests", set)  # lists with os.scandir in a way of its own
        assert cache.get(2) == bytes([2]) * SIZE
    assert cache.there() == {1, 2}


def test_a_shard_gets_its_name_while_nobody_counts(tmp_path, source, monkeypatch):
    cache, rename, counting = Cache(tmp_path, source), Path.rename, []

    def renamed(path, target):
        with open(cache.folder / "lock-room", "r+b") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                counting.append(True)
            except BlockingIOError:
                counting.append(False)
        return rename(path, target)
    monkeypatch.setattr(Path, "rename", renamed)
    assert cache.get(0) is not None and counting == [False]


def test_a_closed_cache_writes_no_list_of_what_is_wanted(tmp_path, source, monkeypatch):
    cache, truncate, closing = Cache(tmp_path, source), os.ftruncate, []

    def closed_meanwhile(descriptor, size):
        closing.append(threading.Thread(target=cache.close))
        closing[0].start()
        assert cache._closed.wait(60)
        truncate(descriptor, size)
    with monkeypatch.context() as patch:
        patch.setattr("os.ftruncate", closed_meanwhile)
        cache.want(bytes(32))  # the descriptor is its own to the end
    closing[0].join()
    listed, = cache.folder.glob("wanted-*")
    assert listed.read_bytes() == bytes(32) and cache._wanted is None
    for digests in (bytes(32), bytes(64)):
        with pytest.raises(Closed):
            cache.want(digests)
    assert listed.read_bytes() == bytes(32)


def test_what_a_process_needs_soon_is_not_removed_for_what_is_not_needed_yet(tmp_path, source):
    one, other = Cache(tmp_path, source, things=3), Cache(tmp_path, source, things=3)
    for number in (0, 1, 2):
        one.get(number)
    one.want(b"".join(bytes.fromhex(source.names[number]) for number in (0, 1)))
    assert other.get(3, ahead=True) is not None and other.there() == {0, 1, 3}
    other.want(bytes.fromhex(source.names[3]))
    assert other.get(4, ahead=True) is None and other.there() == {0, 1, 3} and 4 not in source.asked
    assert other.get(4) is not None and other.there() == {1, 3, 4}  # needed now: the longest unused goes
    one.close()
    assert other.get(5, ahead=True) is not None and other.there() == {3, 4, 5}  # 1 is wanted no more
    assert len(list(other.folder.glob("wanted-*"))) == 1


def test_content_that_is_not_what_the_hash_says_is_refused_by_name_and_not_kept(tmp_path, source):
    cache = Cache(tmp_path, source)
    source.content[source.names[2]] = bytes([77]) * SIZE
    with pytest.raises(UserError, match=rf"thing 2 is not what .*{source.names[2][:12]} -> "):
        cache.get(2)
    assert source.asked == [2, 2] and not cache.there() and not list(cache.folder.glob("*.tmp"))


def test_longer_and_shorter_content_is_refused(tmp_path, source, monkeypatch):
    monkeypatch.setattr("pipeline.data.stored.node_cache.PAUSE_S", 0.0)
    cache, right = Cache(tmp_path, source), source.content[source.names[2]]
    source.content[source.names[2]] = right + b"x"
    with pytest.raises(UserError, match="thing 2 is not what"):
        cache.get(2)
    source.content[source.names[2]] = right[:-1]
    with pytest.raises(UserError, match="thing 2 breaks off after 4,999 of 5,000 bytes"):
        cache.get(2)
    assert not cache.there()


def test_what_breaks_off_goes_on_from_there(tmp_path, source, monkeypatch):
    monkeypatch.setattr("pipeline.data.stored.node_cache.PAUSE_S", 0.0)
    cache, starts, left = Cache(tmp_path, source), [], [1000, 1000, 0, SIZE]

    def read(start):
        starts.append(start)
        return io.BytesIO(source.content[source.names[3]][start:start + left.pop(0)])
    found = cache.open("thing 3", source.names[3], SIZE, read)
    assert os.pread(found, 2 * SIZE, 0) == bytes([3]) * SIZE and starts == [0, 1000, 2000, 2000]
    assert cache.figures.retries == 3 and len(cache.told) == 3
    os.close(found)


def test_a_store_that_does_not_answer_ends_in_its_own_words(tmp_path, source, monkeypatch):
    monkeypatch.setattr("pipeline.data.stored.node_cache.PAUSE_S", 0.0)
    cache = Cache(tmp_path, source)

    def read(start):
        raise UserError("s3://a/b: read failed.")
    with pytest.raises(UserError, match="s3://a/b: read failed"):
        cache.open("thing", source.names[0], SIZE, read)
    assert cache.get(0) is not None  # its lock is free again


def test_a_file_that_was_written_to_is_fetched_again(tmp_path, source):
    cache = Cache(tmp_path, source)
    cache.get(1)
    path = cache.folder / f"{source.names[1]}.arrow"
    for damage in (lambda: path.write_bytes(bytes(SIZE)), lambda: os.truncate(path, SIZE - 1)):
        path.chmod(0o600)
        damage()
        assert cache.get(1) == bytes([1]) * SIZE
    assert len(source.asked) == 3 and len(cache.told) == 2 and str(path) in cache.told[0]


def test_only_what_is_the_caches_own_is_removed(tmp_path, source):
    own = Cache(tmp_path, source).folder
    for place in (tmp_path, own):
        (place / "notes.txt").write_text("mine")
        (place / "weights.arrow").write_bytes(bytes(3 * SIZE))
    left = own / f"{source.names[0]}.node-1.tmp"
    left.write_bytes(bytes(SIZE))
    cache = Cache(tmp_path, source, things=1)
    assert not left.exists()  # of a process that was killed
    for number in range(4):
        cache.get(number)
    assert {path.name for path in own.glob("*.arrow")} == {"weights.arrow", f"{source.names[3]}.arrow"}
    assert (own / "notes.txt").exists() and (tmp_path / "weights.arrow").stat().st_size == 3 * SIZE


def test_what_is_being_fetched_is_left_to_who_fetches_it(tmp_path, source):
    cache, begun, go = Cache(tmp_path, source), threading.Event(), threading.Event()

    def read(start):
        begun.set()
        go.wait()
        return io.BytesIO(source.content[source.names[0]][start:])
    fetching = threading.Thread(target=lambda: cache.open("thing 0", source.names[0], SIZE, read))
    fetching.start()
    begun.wait()
    other = Cache(tmp_path, source, things=1.5)
    assert other.get(1, ahead=True) is None and len(list(other.folder.glob("*.tmp"))) == 1  # its size is spoken for
    found = []
    needing = threading.Thread(target=lambda: found.append(other.get(1)))
    needing.start()  # waits for room
    go.set()
    fetching.join()
    needing.join()
    assert found == [bytes([1]) * SIZE] and other.there() == {1}


def test_threads_fetch_a_thing_once(tmp_path, source):
    cache, found = Cache(tmp_path, source), []
    threads = [threading.Thread(target=lambda: found.append(cache.get(5))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [bytes([5]) * SIZE] * 8 and source.asked == [5]


def test_a_full_disk_lowers_the_bound_and_says_so(tmp_path, source, monkeypatch):
    cache, room = Cache(tmp_path, source), 3 * SIZE
    allocate = os.posix_fallocate

    def full(descriptor, start, size):
        if cache.bytes() + size > room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(descriptor, start, size)
    monkeypatch.setattr("os.posix_fallocate", full)
    for number in range(6):
        assert cache.get(number) == bytes([number]) * SIZE
    assert cache.there() == {3, 4, 5} and cache.limit == room and len(cache.told) == 1
    assert "is full: the cache's bound is 0.000 GB now" in cache.told[0]


def test_a_disk_without_room_for_one_gives_none(tmp_path, source, monkeypatch):
    def full(descriptor, start, size):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
    monkeypatch.setattr("os.posix_fallocate", full)
    cache = Cache(tmp_path, source)
    assert cache.get(0) is None and cache.get(1) is None and not list(cache.folder.glob("*.tmp")) and not source.asked


def test_a_disk_that_fills_while_something_is_written_gives_none(tmp_path, source, monkeypatch):
    cache = Cache(tmp_path, source)

    def full(descriptor, data, at):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with monkeypatch.context() as patch:
        patch.setattr("pipeline.data.stored.node_cache._write", full)
        assert cache.get(0) is None and not list(cache.folder.glob("*.tmp")) and cache.told


def test_a_real_limit_on_files_gives_none(tmp_path):
    """As a full disk, without being root: the kernel refuses the size."""
    program = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000));"
        "from pathlib import Path; from tests.data.stored.test_node_cache import Cache, Source;"
        "cache = Cache(Path(sys.argv[1]), Source());"
        "assert cache.get(0) is None; assert 'is full' in cache.told[0], cache.told;"
        "assert not list(cache.folder.glob('*.tmp'))")
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=REPOSITORY, check=True)


def test_a_killed_process_leaves_no_lock_and_no_half_file(tmp_path, source):
    program = (
        "import sys, time; from pathlib import Path; from tests.data.stored.test_node_cache import Cache, Source;"
        "cache = Cache(Path(sys.argv[1]), Source()); cache.want(bytes(32));"
        "cache.open('thing 0', cache.source.names[0], 5000, lambda start: time.sleep(10000))")
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], cwd=REPOSITORY)
    own = tmp_path / f"drover-tokens-{os.getuid()}"
    wait_for(lambda: list(own.glob("*.tmp")), lambda: "it fetches", of=process)
    process.kill()
    process.wait()
    cache = Cache(tmp_path, source, things=1)
    assert cache.get(0) == bytes(SIZE) and cache.get(1) is not None
    assert not list(own.glob("*.tmp")) and not list(own.glob("wanted-*"))


@pytest.mark.parametrize("place", ["file", "link", "absent"])
def test_a_folder_that_cannot_be_used_is_named(tmp_path, source, place):
    if place == "file":
        (tmp_path / "c").write_text("")
    elif place == "link":
        (tmp_path / "c").mkdir()
        (tmp_path / "c" / f"drover-tokens-{os.getuid()}").symlink_to(tmp_path)
    else:
        (tmp_path / "c").symlink_to(tmp_path / "nowhere/at all")
    with pytest.raises(UserError, match=r"train\.cache\.folder"):
        Cache(tmp_path / "c", source)


def test_reading_ends_in_the_middle_when_it_is_closed(tmp_path, source):
    cache = Cache(tmp_path, source)

    def read(start):
        cache.close()
        return io.BytesIO(bytes(SIZE))
    with pytest.raises(Closed):
        cache.open("thing 0", source.names[0], SIZE, read)
    assert not list(cache.folder.glob("*.tmp"))
