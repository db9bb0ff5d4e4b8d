"""The configuration that is proposed for a folder of one's own text."""

import errno
import json
import os
import re
import shlex
from pathlib import Path

import pytest

from drover.pipeline.config.loading import load_config
from drover.pipeline.contract.run import Run
from drover.pipeline.core.errors import UserError
from drover.pipeline.data.sources import input_files
from drover.pipeline.data.text_shards import SPLITS, read_shard, shard_records
from drover.tools import survey
from drover.tools.init import look, main, propose
from tests.data.source_files import COMPRESS, batch, config_of, files_source, lines, write_batches
from tests.refusal import printed, refused, table
from tests.stages.here import run_here


@pytest.fixture
def notes(tmp_path, monkeypatch):
    """Six files of two kinds, and one that holds no text."""
    folder = tmp_path / "my notes"
    folder.mkdir()
    for number in range(6):
        text = "".join(f"On day {number}.{line} we walked {line * 7 % 13} miles to the sea.\n" for line in range(400))
        (folder / f"{number}.{'md' if number % 2 else 'rst'}").write_text(text)
    (folder / "photo.png").write_bytes(b"\x89PNG")
    monkeypatch.chdir(tmp_path)
    return folder


def wide(number):
    return f"On day {number} we walked {number * 7 % 13} miles to the sea, größer als früher.\n" * 9


ENCODED = {"a.md": "utf-8", "b.MD": "utf-8", "[x] a*b/c.md": "utf-8", "two\nlines/d.md": "utf-8", "latin.md": "cp1252",
           "caf\udce9/e.md": "utf-8", "caf\udce9/latin.txt": "cp1252", "folder.txt/f.txt": "utf-8", "wide.md": "utf-16",
           "sub/wide.txt": "utf-16-le", "sub/deep/russian.txt": "cp1251", "content.jsonl": "utf-8",
           "body.jsonl.gz": "utf-8", "raw_content.json": "utf-8", "review.csv": "cp1252"}


def zoo(folder):
    """Every kind of file, in folders of odd names; the texts that are to be read, and the names of the others."""
    texts = {name: wide(number) for number, name in enumerate(ENCODED)}
    texts["sub/deep/russian.txt"] = "Это русский текст о реке и мельнице. " * 9
    for name, text in texts.items():
        path, encoding = folder / name, ENCODED[name]
        path.parent.mkdir(parents=True, exist_ok=True)
        field = path.name.partition(".")[0]
        if ".csv" in name:
            path.write_bytes(f'id,{field}\n1,"{text}"\n'.encode(encoding))
        elif ".js" in name:
            path.write_bytes(COMPRESS[".gz" if "gz" in name else ""](lines([{"id": 1, field: text}])))
        else:
            path.write_bytes(text.encode(encoding))
    write_batches(folder / "table.parquet", batch(("text", [wide(97)]), ("stars", [1])))
    write_batches(folder / "bytes.parquet", batch(("text", [wide(93).encode()]), ("image", [b"\x89PNG\0" * 99])))
    (folder / "semicolon.csv").write_text(f'id;text\n1;"{wide(98)}"\n')
    (folder / "array.jsonl").write_text(json.dumps([{"story": wide(95)}, {"story": wide(96)}]))
    (folder / "sep.csv").write_text(f'sep=|\nid|text\n1|"{wide(94)}"\n')
    (folder / "wrapped.json").write_text(json.dumps({"version": 1, "data": [{"page": {"text": wide(99)}}]}))
    others = {
        "package.json": b'{"name": "site", "version": "1"}', "table.csv": b"day,rain\nMonday,3\n", "README": b"Read.",
        "page.html": b"<p>", "page.md": b"<!doctype html>", "photo.md": b"\x89PNG\r\n\0", "zeros.txt": bytes(99),
        "broken.md": "größer, früher".encode() + b"\xff",
        "cut.parquet": b"PAR1",
        "some.jsonl": b'{"text": "a"}\n{}\n', "bad.jsonl": b'{"text": "a"\n',
        "key.jsonl": b'{"text": "a", "text": "b"}', "none.csv": b"text\n",
        "lists.json": b'{"train": [{"text": "a"}], "test": [{"text": "b"}]}', "empty.md": b" \n"}
    for name, data in others.items():
        (folder / name).write_bytes(data)
    (folder / "gone.md").symlink_to("nowhere")
    (folder / "loop").symlink_to("..")
    os.mkfifo(folder / "pipe.txt")
    return {*texts.values(), *map(wide, range(93, 100))}, {*others, "gone.md", "pipe.txt"}


def test_what_is_proposed_for_any_folder_runs_and_the_rest_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    wanted, others = zoo(tmp_path / "zoo")
    output = printed(capsys, main, "zoo", "--minutes", "1")
    assert {name for name in others if not re.search(rf"left out: (.*, )?{name}[:,]", output)} == set()
    assert run_here("shard", "zoo.yaml", "launch.processes=1", "shard.validation_rule=hash",
                    "shard.validation_share=0.5") == 0
    run = Run(load_config("zoo.yaml"))
    texts = {document.text for split in SPLITS for record in shard_records(run.finished("shard"), split)
             for document in read_shard(run.own_folder("shard"), record)}
    assert texts == wanted and run.finished("shard").counts["rejected"] == 0


@pytest.mark.parametrize(("files", "left_out"), [
    ("train.md eval/a.md test_1.md latest.md", ["eval/a.md", "test_1.md"]), ("a.md test.md", []),
    ("data/train-0.jsonl data/test-0.jsonl dataset_infos.json", ["data/test-0.jsonl", "dataset_infos.json"]),
    ("a.jsonl config.json state.json", ["config.json", "state.json"])])
def test_a_test_split_and_descriptions_of_data_sets_are_left_out(tmp_path, files, left_out):
    for number, name in enumerate(files.split()):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"description": wide(number)} if name.endswith("json") else
                                                {"text": wide(number)}))
    result = look(tmp_path)
    assert result.files == len(files.split()) - len(left_out)
    assert {name for name in files.split() if re.search(rf"left out: (.*, )?{name}[:,]", "\n".join(result.remarks))
            } == set(left_out)
    source = files_source(*(path for own in result.sources.values() for path in own))
    assert {name for name, _ in input_files(config_of(source))} & {f"s/{name}" for name in left_out} == set()


def test_a_folder_that_is_closed_is_refused_by_name(notes, monkeypatch):
    (notes / "deep/closed").mkdir(parents=True)

    def scan(folder, real=os.scandir):
        if Path(folder).name == "closed":
            raise PermissionError(errno.EACCES, "Permission denied", folder)
        return real(folder)
    monkeypatch.setattr(os, "scandir", scan)
    refused(UserError, "deep/closed cannot be read: Permission denied. Make it readable", look, notes)


def test_a_long_text_is_divided_into_documents(notes, monkeypatch):
    monkeypatch.setattr(survey, "LONG_BYTES", 1000)
    (notes / "crlf.txt").write_bytes(b"a day at the sea\r\n\r\nanother day\r\n" * 40)
    assert {kind.separator for kind in look(notes).sources} == {"\n", "\r\n\r\n"}


def test_few_files_are_a_corpus_with_held_out_text(notes):
    assert main([str(notes), "--minutes", "1"]) == 0
    config = load_config("my-notes.yaml")
    assert config.shard.validation_rule == "tail" and len(config.shard.sources[0].paths) == 2
    assert config.train.prompts == ["On day 0.0 we", "On day 1.0 we", "On day 2.0 we"]
    assert run_here("shard", "my-notes.yaml", "launch.processes=1") == 0
    counts = Run(config).finished("shard").counts
    assert (counts["documents_in"], counts["rejected"]) == (6, 0)


@pytest.mark.parametrize(("flops", "minutes", "params", "limit", "depth"), table("""
    1e11 -> 10 -> null -> epochs of your text -> 2
    1e8 -> 0.1 -> null -> % of your text -> 2
    1e11 -> 10 -> 30000000 -> epochs of your text -> 8""", float, float, json.loads, str, int))
def test_what_the_text_or_the_time_allows(notes, flops, minutes, params, limit, depth):
    result = propose(look(notes), flops, minutes, params)
    assert limit in result.limit and result.shape.layers == depth and not result.shape.problems()


def test_a_file_of_a_word_is_a_corpus_too(tmp_path):
    (tmp_path / "a.md").write_text("a")
    assert propose(look(tmp_path), 1e11, 10, None).steps == 20


@pytest.mark.parametrize(("arguments", "message"), table("""
    'my notes' --minutes 0 -> above 0
    'my notes' --params many -> above 0
    nowhere -> is no folder
    pictures -> left out: photo.png: the name does
    'my notes' --to pictures -> there already""", shlex.split))
def test_what_cannot_be_is_refused(notes, arguments, message, capsys):
    (notes.parent / "pictures").mkdir()
    (notes.parent / "pictures/photo.png").touch()
    assert message in printed(capsys, main, *arguments, expect=2) and not (notes.parent / "my-notes.yaml").exists()
