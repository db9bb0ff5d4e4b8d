"""Sources on a web server: the same shards as of the same files on a disk, or a refusal by name."""

from urllib.parse import quote

import pytest

from drover.launch.submit import main as submit
from drover.pipeline.contract.inputs import listed_files
from drover.pipeline.core.errors import UserError
from drover.pipeline.data import sources
from drover.pipeline.data.reading import unit_documents
from drover.pipeline.storage.object_files import find
from tests.crawl import write_crawl
from tests.data.source_files import config_of
from tests.object_store import Fault, hurry, refuse, served, set_environment
from tests.refusal import printed, refused, table
from tests.stages.test_shard import files_source, folder_of, run, write_config
from tests.storage.test_object_sources import files, same_outputs, small  # noqa: F401 - fixtures


class Site:
    """The files of a folder behind a web server: with ranges and strong ETags, but where `odd` says otherwise."""

    def __init__(self, folder):
        self.folder = folder
        self.odd = "sound"
        self.url = ""
        self.server = None

    def __call__(self, environ, start):
        from werkzeug.utils import send_file
        path = self.folder / environ["PATH_INFO"].encode("latin-1").decode().strip("/")
        if not path.is_file() or self.odd == "refusing":
            return refuse(start, "403 Forbidden" if self.odd == "refusing" else "404 Not Found", "None", "of that name")
        if self.odd == "without ranges":
            environ.pop("HTTP_RANGE", None)
        response = send_file(path, environ, mimetype="application/octet-stream", conditional=True,
                             etag=self.odd != "without ETags")
        if self.odd == "with weak ETags":
            response.set_etag(response.get_etag()[0], weak=True)
        if self.odd == "without lengths":
            del response.headers["Content-Length"]
        return response(environ, start)

    def url_of(self, name):
        return f"{self.url}/{quote(str(name))}"


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A server of the folder `in`."""
    set_environment(monkeypatch)
    hurry(monkeypatch)
    own = Site(tmp_path / "in")
    with served(own) as (own.url, own.server):
        yield own


def configs(place, site):
    """Of the same files on a disk and from the server: of every kind, with names that an address has to quote."""
    own = {}
    write_crawl(site.folder / "crawl", {"news": 40, "moved": 3}, files=2)
    for folder in ("lines", "frames", "packed", "columns", "crawl"):
        (site.folder / folder).rename(site.folder / f"{folder} of 100%")
        own[folder] = [path for path in sorted(site.folder.glob(f"{folder}*/**/*"))
                       if path.is_file() and not path.name.startswith(".")]
    for name in ("local", "remote"):
        (place / name).mkdir()
        yield write_config(place / name, [files_source(folder, *(
            site.url_of(path.relative_to(site.folder)) if name == "remote" else path for path in paths))
            for folder, paths in own.items()], shard_mb=0.02, max_rejected_share=0.2, validation_share=0.1,
                           drop_duplicates=False)


def test_shards_are_those_of_the_same_files_on_a_disk(tmp_path, files, small, site, capsys):  # noqa: F811
    local, remote = configs(tmp_path, site)
    faults = [Fault(kind, 3, "GET", after=after)
              for kind, after in (("cut", 2), ("error", 5), ("slow down", 9), ("too many", 14))]
    site.server.faults += faults
    assert run(local) == run(remote) == 0
    assert all(fault.met == fault.times for fault in faults)
    capsys.readouterr()
    _, manifest = same_outputs(local, remote)
    assert all(own["path"].startswith(site.url) for own in manifest.files)
    assert run(remote) == 0 and "up to date" in capsys.readouterr().out
    changed = next(site.folder.glob("lines*/a.jsonl"))
    changed.write_bytes(b'{"text": "new"}\n')
    assert run(remote) == 2 and "a.jsonl" in capsys.readouterr().err
    changed.unlink()
    assert run(remote) == 0 and "up to date" in capsys.readouterr().out, "finished work stands when a file is gone"


def units_of(site, name, data):
    site.folder.mkdir(exist_ok=True)
    (site.folder / name).write_bytes(data)
    config = config_of(files_source("s", site.url_of(name)), shard_mb=0.05)
    return sources.reading_units(config.shard, listed_files(sources.input_files(config)))


ROWS = b"".join(b'{"text": "row %d"}\n' % number for number in range(20_000))


@pytest.mark.parametrize("odd", ["sound", "with weak ETags"])
def test_a_file_that_changes_while_it_is_read_is_refused(site, small, odd):  # noqa: F811
    site.odd = odd
    unit, *others = units_of(site, "a.jsonl", ROWS)
    assert sum(len(list(unit_documents(own))) for own in (unit, *others)) == 20_000
    reading = unit_documents(unit)
    next(reading)
    (site.folder / "b.jsonl").write_bytes(ROWS.replace(b"row", b"ROW"))
    (site.folder / "b.jsonl").rename(site.folder / "a.jsonl")
    message = refused(UserError, "reads what is there then", list, reading)
    assert site.url_of("a.jsonl") in message


@pytest.mark.parametrize("odd, name, says", table("""
    sound -> none.jsonl -> is not there
    refusing -> a.jsonl -> was refused: .*403.*the address .web servers are sent no name
    without ETags -> a.jsonl -> the server sends no ETag.*Download it
    without lengths -> a.jsonl -> does not say how long they are.*Download
    sound -> *.jsonl -> lists no files.*Give the address of each file
    sound -> a.jsonl?download=true -> lists no files
    sound -> folder/ -> is not there"""))
def test_what_cannot_be_read_from_a_web_server_is_told_before_anything_starts(tmp_path, site, capsys, odd, name, says):
    site.odd = odd
    site.folder.mkdir()
    (site.folder / "a.jsonl").write_bytes(ROWS)
    address = f"{site.url}/{name}"
    refused(UserError, says, find, address)
    config = write_config(tmp_path, [files_source("web", address), files_source("other", tmp_path / "none.txt")])
    message = printed(capsys, submit, "--stage", "shard", "--config", config, "--cluster", "local", expect=2)
    assert f"source web: {address.strip('/')}" in message and "source other" in message
    assert not (folder_of(config) / "units").exists()


def test_a_server_that_sends_whole_files_in_place_of_parts_is_refused(site):
    units = units_of(site, "a.jsonl", ROWS)
    site.odd = "without ranges"
    refused(UserError, f"{site.url_of('a.jsonl')}: the server does not send parts.*Download", list,
            unit_documents(units[0]))
