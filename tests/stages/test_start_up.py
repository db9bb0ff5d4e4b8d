"""What the ranks of a training ask the file system for when they start: rank 0 reads the run, and tells the others."""

import itertools
import socket
import threading
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from drover.pipeline.contract.broadcast import Channel
from drover.pipeline.contract.manifest import read_manifest
from drover.pipeline.contract.signed import SECRET, MessageError
from drover.pipeline.core.errors import UserError
from drover.pipeline.data.token_shards import ShardTable
from drover.pipeline.training.data import refuse_cut_shards
from tests.refusal import refused
from tests.stages.training import manifest_of, run_train

WATCHING = '''
import os, sys
place = os.environ["WATCH_FOLDER"] + f"/rank{os.environ.get('RANK', '0')}"
def note(kind, path):
    if isinstance(path, (str, bytes, os.PathLike)) and "/runs/" in os.fsdecode(path):
        with_own = os.open(place, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(with_own, f"{kind} {os.fsdecode(path)}\\n".encode())
        os.close(with_own)
def hook(event, arguments):
    if event in ("open", "os.listdir", "os.scandir", "os.mkdir", "os.rename", "os.remove") and arguments:
        note(event, arguments[0])
def counting(name):
    plain = getattr(os, name)
    def call(path, *rest, **more):
        note(name, path)
        return plain(path, *rest, **more)
    setattr(os, name, call)
sys.addaudithook(hook)
for name in ("stat", "lstat", "access"):
    counting(name)
'''
"""A plugin that every rank imports: it writes down what the rank touches of runs."""


def touched(folder, rank):
    """What a rank did, as (kind, path inside of the run), until its first save."""
    lines = (folder / f"rank{rank}").read_text().splitlines()
    before_any_save = itertools.takewhile(lambda line: "step-" not in line, lines)
    return [(line.partition(" ")[0], line.partition("/runs/")[2].partition("/")[2]) for line in before_any_save]


def test_other_ranks_touch_only_their_share_of_the_shards(tmp_path, fresh, encoded):
    plugin = tmp_path / "watching_files.py"
    plugin.write_text(WATCHING)
    run_train(fresh, f"plugins=[{plugin}]", "train.steps=4", "train.batch_tokens=1536", ranks=3,
              WATCH_FOLDER=str(tmp_path), LOCAL_WORLD_SIZE="3")
    shards = {f"encode/{record['path']}" for record in manifest_of(encoded, "encode").outputs}
    first, *others = (touched(tmp_path, rank) for rank in range(3))
    for mine in others:
        assert {path for _, path in mine} <= shards  # and nothing else of any run
    assert ("open", "encode/manifest.json") in first, "rank 0 is watched as well"
    sizes = [{path for kind, path in mine if kind == "stat"} & shards for mine in (first, *others)]
    assert max(map(len, sizes)) <= len(shards) // 3 + 1
    assert sorted(itertools.chain(*sizes)) == sorted(shards), "each by one rank: at the start, compared, at each save"


def channel(monkeypatch, **variables):
    """That of a rank with these variables."""
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    return Channel.of_process()


def channels(monkeypatch, world=3):
    """A channel of each rank, in one process; rank 0's has the store."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    return [channel(monkeypatch, RANK=rank, WORLD_SIZE=world, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
            for rank in range(world)]


@pytest.mark.parametrize("status", [0, 2])
def test_without_an_agent_rank_0_stays_until_all_have_heard_that_it_ends(monkeypatch, status):
    first, *others = channels(monkeypatch)
    ending = threading.Thread(target=first.end, args=(status,))
    ending.start()
    for other in others:
        ending.join(0.2)
        assert ending.is_alive()  # one has not heard it
        assert other.listen("train", list) == status
    ending.join(10)
    assert not ending.is_alive()


def test_a_rank_of_other_code_is_told_so(monkeypatch):
    first, *others = channels(monkeypatch, 2)
    first._send({"config": {"setting_of_tomorrow": 1}, "inputs": {}, "fingerprint": {}, "accepted": []})
    refused(UserError, "Rank 1 cannot read the message of rank 0, so it runs other code",
            others[0].listen, "train", list)


@pytest.mark.parametrize("with_plugins", [False, True])
def test_a_rank_takes_plugins_from_its_own_command_line_and_none_from_rank_0(monkeypatch, tmp_path,
                                                                               with_plugins):
    first, other = channels(monkeypatch, 2)
    (tmp_path / "of_rank_0.py").write_text("from pathlib import Path\nPath(__file__).with_suffix('.ran').touch()\n")
    first._send({"config": {"plugins": [str(tmp_path / "of_rank_0.py")]}, "with_plugins": with_plugins, "inputs": {},
                 "files": [], "fingerprint": {}, "accepted": []})
    assert other.listen("train", lambda: ["our.module"]).config.plugins == ["our.module"] * with_plugins
    assert not (tmp_path / "of_rank_0.ran").exists()


def test_who_has_not_the_secret_of_the_start_tells_no_rank_anything(monkeypatch):
    first, second = channels(monkeypatch, 2)
    first._send({"end": 0})
    monkeypatch.setenv(SECRET, "which rank 0 did not have")
    refused(MessageError, f"The message work .* has another {SECRET}", second.listen, "train", list)


def test_ranks_that_an_agent_starts_again_find_nothing_of_the_attempt_before(monkeypatch):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # the agent's
    settings = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port,
                "TORCHELASTIC_USE_AGENT_STORE": True}
    for attempt, status in enumerate((2, 0)):
        first, second = (channel(monkeypatch, **settings, TORCHELASTIC_RESTART_COUNT=attempt, RANK=rank)
                         for rank in range(2))
        first.end(status)
        assert second.listen("train", list) == status
    refused(UserError, "--max-restarts 0", channel, monkeypatch, **settings,
            TORCHELASTIC_MAX_RESTARTS=3, GROUP_WORLD_SIZE=2)


def test_cut_shards_are_named_for_all_ranks_together(tmp_path, encoded):
    encode = encoded.parent / "runs/mini/encode"
    table = ShardTable.of(read_manifest(encode).outputs)

    def refuse(folder, *others, world=1):
        refuse_cut_shards(folder, table, SimpleNamespace(
            rank=0, world=world + len(others), gather=lambda own: [own, *others]))
    refuse(encode)
    cut = [f"shard {number} is cut" for number in range(12)]
    for folder, others, world, message in (
            (tmp_path, (), len(table), rf"^{tmp_path}.* is missing. Run --stage encode again[^\n]*$"),
            (encode, (cut,), 1, r"^12 of .*\n  - shard 0 is cut\n(.|\n)*\.\.\. and 2 more$")):
        refused(UserError, message, refuse, folder, *others, world=world)
