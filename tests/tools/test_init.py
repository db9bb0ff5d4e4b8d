"""The configuration that is proposed for a folder of one's own text."""

import errno
import json
import math
import os
import random
import re
import shlex
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from drover.launch.local import find_machine
from drover.pipeline.config.loading import load_config
from drover.pipeline.config.training import tokens_text
from drover.pipeline.contract.run import Run
from drover.pipeline.core import errors
from drover.pipeline.core.errors import AbsentInputError, UserError
from drover.pipeline.data import extraction
from drover.pipeline.data.sources import input_files
from drover.pipeline.data.text_shards import SPLITS, read_shard, shard_records
from drover.tools import survey
from drover.tools.init import look, main, propose
from tests.conftest import REPOSITORY
from tests.data.reading.test_pages import ENDLESS
from tests.data.reading.test_pdf import DRAWINGS, FERRY
from tests.data.reading.test_warc import archive
from tests.data.source_files import COMPRESS, batch, config_of, files_source, lines, write_batches
from tests.dirty_corpus import paragraphs
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
        "package.json": b'{"name": "site", "version": "1"}', "table.csv": b"day,rain\nMonday,3\n",
        "icon.svg": b"<svg/>", "manual.epub": b"PK\3\4", "own.key": b"-----BEGIN PRIVATE KEY-----\n",
        "server.bin": bytes(99), "late.bin": b"text " * 999 + b"\0\xff",
        "page.docx": b"PK\3\4", "page.md": b"<!doctype html>", "photo.md": b"\x89PNG\r\n\0", "zeros.txt": bytes(99),
        "broken.md": "größer, früher".encode() + b"\xff",
        "cut.parquet": b"PAR1",
        "some.jsonl": b'{"text": "a"}\n{}\n', "bad.jsonl": b'{"text": "a"\n',
        "none.csv": b"text\n",
        "lists.json": b'{"train": [{"text": "a"}], "test": [{"text": "b"}]}', "empty.md": b" \n",
        "mark.md": b"\xef\xbb\xbf", "spaces.md": b"\xc2\xa0\n"}
    for name, data in others.items():
        (folder / name).write_bytes(data)
    (folder / "README").write_text(wide(92))
    (folder / "sub/LICENSE.gz").write_bytes(COMPRESS[".gz"](wide(91).encode()))
    (folder / "sub/code.pyi").write_text(wide(90))
    (folder / "sub/pages.crawl").write_bytes(lines([{"id": number, "content": wide(number)} for number in (58, 59)]))
    (folder / "alt.mbox").write_text(f"From a@b Mon\n{wide(88)}\n\nFrom a@b Tue\n{wide(89)}")
    for number in range(30):
        (folder / "mails").mkdir(exist_ok=True)
        (folder / f"mails/17{number:02}.M{number}P1.post:2,S").write_bytes(wide(60 + number % 28).encode(
            "cp1252" if number == 7 else "utf-8"))
    (folder / "plain/deep").mkdir(parents=True)
    for number, name in enumerate(("one", "two", "deep/three")):
        (folder / "plain" / name).write_text(wide(50 + number))
    (folder / "gone.md").symlink_to("nowhere")
    (folder / "loop").symlink_to("..")
    os.mkfifo(folder / "pipe.txt")
    mails = {f"From a@b Mon\n{wide(88)}", f"a@b Tue\n{wide(89)}", *map(wide, range(58, 88))}
    return {*texts.values(), *mails, *map(wide, [50, 51, 52, *range(90, 100)])}, {*others, "gone.md", "pipe.txt"}


def test_what_is_proposed_for_any_folder_runs_and_the_rest_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    wanted, others = zoo(tmp_path / "zoo")
    output = printed(capsys, main, "zoo", "--minutes", "1")
    proposed = Path("zoo.yaml").read_text()
    assert {name for name in others if not re.search(rf"left out: (.*, )?{name}[:,]", proposed)} == set()
    assert re.match("left out:\n(  .*\n){6}  and for [0-9]+ more reasons, which zoo.yaml has\n", output)
    assert "/mails/*\n" in proposed and "/mails/1707.M7P1.post:2,S\n" in proposed, "but for the one in Latin-1"
    assert "/plain/*\n" in proposed, "all of a folder are of one kind"
    assert max(map(len, re.findall("^ .*", proposed, re.MULTILINE))) < 80 + len(str(tmp_path)), "a path has a line"
    assert run_here("shard", "zoo.yaml", "launch.processes=1", "shard.validation_rule=hash",
                    "shard.validation_share=0.5") == 0
    run = Run(load_config("zoo.yaml"))
    texts = {document.text for split in SPLITS for record in shard_records(run.finished("shard"), split)
             for document in read_shard(run.own_folder("shard"), record)}
    assert texts == wanted and run.finished("shard").counts["rejected"] == 0


def test_pages_are_taken_if_what_reads_them_is_installed(tmp_path, monkeypatch, capsys):
    """Also where a page hangs what reads it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(survey, "SECONDS", 0.5)
    monkeypatch.setattr(extraction, "SECONDS", 1.0)
    Path("web").mkdir()
    for number in range(30):
        Path(f"web/{number}.html").write_text(f"<html><title>a</title><p>{wide(number)}")
    Path("web/a.warc.gz").write_bytes(archive(*[
        (f"{number}", f"{ENDLESS * (number == 51)}<p>{wide(number)}".encode(), "text/html", {})
        for number in range(50, 55)]))
    Path("web/a.pdf").write_bytes(FERRY)
    Path("web/scan.pdf").write_bytes(DRAWINGS)
    Path("web/late.docx").write_bytes(b"PK")
    Path("web/notes.ipynb").write_text('{"cells": []}')
    Path("web/login.env").write_text("TOKEN=abc")
    Path("web/fields.jsonl").write_bytes(lines([{"html": f"<html><p>{wide(number)}", "url": f"/{number}"}
                                                         for number in range(60, 65)]))
    output = printed(capsys, main, "web")
    assert "its text is not found within 0.5 s of CPU time" in output
    assert "scan.pdf: none of its 2 pages holds text" in output and "  late.docx: an office file; " in output
    assert "notes.ipynb: a notebook; convert it" in output and "login.env: settings for a shell" in output
    proposed = Path("web.yaml").read_text()
    assert "an office file; convert it to text first (`pandoc FILE.docx --to plain" in proposed
    assert "prompts: [On day " in proposed.replace('"', "")
    assert "text_field: html\n      html: fields\n      meta_fields:\n      - url\n" in proposed
    run_here("shard", "web.yaml", "launch.processes=1", "shard.filters=[]", "shard.near_duplicates=null")
    counts = Run(load_config("web.yaml")).finished("shard").counts
    assert (counts["documents_in"], counts["rejected"], counts["files"]["in"]) == (42, 2, 34)
    monkeypatch.setattr(errors, "find_spec", lambda name: None if name == "resiliparse" else find_spec(name))
    refused(UserError, "HTML: its text needs the package resiliparse, which is not installed here: `pip install",
            look, Path("web"))


LOG = "".join(
    f"12:{number % 60:02} INFO worker of {number % 7} answered in {number * 7919} ms\n" for number in range(12_000))
"""Text of seven words, however much there is of it."""
CHINESE = "".join(chr(0x4e00 + number * 7919 % 4001) + "。\n" * (number % 50 == 0) for number in range(178_000))
"""More characters than a small vocabulary has ids."""


@pytest.mark.parametrize(("text", "kind"), [(LOG, "byte"), (CHINESE, "tiktoken")])
def test_the_vocabulary_is_one_that_the_text_supports(tmp_path, monkeypatch, text, kind):
    monkeypatch.chdir(tmp_path)
    Path("own").mkdir()
    Path("own/a.txt").write_text(text)
    assert main(["own"]) == run_here("shard", "own.yaml") == run_here("tokenizer", "own.yaml") == 0
    assert Run(load_config("own.yaml")).finished("tokenizer").counts["kind"] == kind


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
    assert {name for name in files.split() if re.search(rf"(?m)^(.*, )?{name}[:,]", "\n".join(result.left_out))
            } == set(left_out)


def test_what_is_closed_is_left_out_by_name_and_the_rest_runs(notes, monkeypatch, capsys):
    (notes / "deep/closed").mkdir(parents=True)

    def scan(folder, real=os.scandir):
        if str(folder).endswith("closed"):
            raise PermissionError(errno.EACCES, "Permission denied", folder)
        return real(folder)
    monkeypatch.setattr(os, "scandir", scan)
    output = printed(capsys, main, str(notes))
    assert "deep/closed: a folder that cannot be read: Permission denied" in output
    run_here("shard", "my-notes.yaml", "launch.processes=1")
    assert Run(load_config("my-notes.yaml")).finished("shard").counts["files"]["in"] == 6
    refused(AbsentInputError, "closed cannot be read: Permission denied. Make it readable, or name it in `exclude`",
            input_files, config_of(files_source(notes / "**/*.md")))


def test_records_that_shard_will_reject_are_counted_and_their_share_is_allowed(notes, capsys):
    good = [{"text": wide(number)} for number in range(60)]
    (notes / "a.jsonl").write_bytes(lines(good[:50]) + b'{"text": "cut\n{"text": null}\n{"text": "br\xffoken"}\n')
    (notes / "b.csv").write_text("text,day\n" + "by the sea,1\n" * 20 + "by the sea,2,3\n")
    (notes / "scan.pdf").write_bytes(DRAWINGS)
    (notes / "worst.jsonl").write_bytes(lines(good[:2]) + b"{\n" * 3)
    output = printed(capsys, main, str(notes))
    [kinds] = re.findall(r"shard will reject 5 of 81 records that were looked at: (.*)\n", output)
    assert re.findall(r"(\d) of (\S+): ", kinds) == [*[("1", "a.jsonl")] * 3, ("1", "b.csv"), ("1", "scan.pdf")]
    assert "scanned" in kinds, "each kind has a reason of its own"
    assert "worst.jsonl: most of its records cannot be read: " in output
    run_here("shard", "my-notes.yaml", "launch.processes=1")
    run = Run(load_config("my-notes.yaml"))
    counts = run.finished("shard").counts
    assert counts["rejected"] == 5 and 5 / counts["documents_in"] < run.config.shard.max_rejected_share < 0.2


def test_damaged_and_hidden_files_are_left_out_and_counted(notes, capsys):
    data = lines([{"text": wide(number)} for number in range(50)])
    packed = {name: compress(data) for name, compress in COMPRESS.items()}
    for name, data in (("cut.jsonl.gz", packed[".gz"][:300]), ("cut.jsonl.zst", packed[".zst"][:300]),
                       ("other.jsonl.gz", bytes(99)), ("plain.jsonl.gz", packed[""]),
                       (".git/objects/1", b"1"), (".git/2", b"2"), (".profile", b"3")):
        (notes / name).parent.mkdir(parents=True, exist_ok=True)
        (notes / name).write_bytes(data)
    printed(capsys, main, str(notes))
    text = Path("my-notes.yaml").read_text()
    for pattern in ("cut.jsonl.gz: it cannot be read: Compressed file ended", "cut.jsonl.zst: it cannot be read: ",
                    "other.jsonl.gz, plain.jsonl.gz: its name .* rename it", "3 hidden files"):
        assert re.search(f"# left out: {pattern}", text)
    assert ".git" not in text


def test_of_very_many_files_the_same_share_of_each_ending_is_looked_into(notes, monkeypatch, capsys):
    for number in range(40):
        (notes / f"mail.{number}").write_text(wide(number))
        (notes / f"{number}.log").write_text(wide(number))
    (notes / "mail.40").write_bytes(wide(40).encode("cp1252"))
    opened = []

    def kind(path, *more, real=survey._kind):
        opened.append(path.name)
        return real(path, *more)
    monkeypatch.setattr(survey, "LOOKED_INTO", 20)
    monkeypatch.setattr(survey, "_kind", kind)
    output = printed(capsys, main, str(notes), "--to", "a.yaml")
    first = [*opened]
    assert main([str(notes), "--to", "b.yaml"]) == 0 and opened == first * 2 and len(first) < 87
    assert f"looked into {len(first)} of 88 files, the same ones each time" in output
    assert load_config("b.yaml").name == "b" and "drover chat a --interactive" in output, "each has a run of its own"
    assert load_config("a.yaml").shard.max_rejected_share == 0.01 and len(input_files(load_config("a.yaml"))) >= 86


@pytest.mark.parametrize(("folder", "name"), table("""
    Größe, Ærø & café -> Groesse-Aeroe-cafe
    日記 -> mine""", str, str))
def test_the_name_keeps_the_letters_that_a_run_may_have(tmp_path, monkeypatch, folder, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "a.md").write_text(wide(1))
    assert main([folder]) == 0 and load_config(f"{name}.yaml").name == name


@pytest.mark.parametrize("minutes", [1, 2, 5, 10, 60])
def test_the_training_takes_the_minutes_that_are_asked_for(tmp_path, minutes):
    """By the costs that were measured (benchmarks/RESULTS.md)."""
    prose, chance = paragraphs(), random.Random(0)
    (tmp_path / "a.jsonl").write_bytes(lines([{"text": "\n".join(chance.choices(prose, k=80))} for _ in range(1000)]))
    proposed = propose(look(tmp_path), 8e10, minutes, None)
    assert 0.8 < proposed.seconds(8e10) / (60 * minutes) < 1.1
    more = propose(look(tmp_path), 8e10, 2 * minutes, None)
    assert more.tokens > proposed.tokens and more.expected(2.0) < proposed.expected(2.0), "and expects less loss"


def test_the_loss_that_is_expected_names_law_and_measurement(notes, capsys):
    output = printed(capsys, main, str(notes), "--minutes", "1")
    bits, low, high, page, anchor = re.search(
        r"expected: about (.*) bits per byte of validation text, between (.*) and (.*), by a rule from small models "
        r"trained on 1 to 10 MB \((.*)#(.*)\)\n", output).groups()
    assert f"## {anchor.replace('-', ' ')}\n" in (REPOSITORY / page).read_text().replace("`", "").replace(
        "What", "what"), "the rule is there"
    config = load_config("my-notes.yaml")
    ranks = config.launch.processes or 1
    assert ranks == min(8, 2 ** int(math.log2(find_machine().cores)))
    tokens = tokens_text(config.train.steps * config.train.batch_tokens)
    assert f" parameters, {tokens} tokens (" in output and f"train:   # {tokens} tokens, " in Path(
        "my-notes.yaml").read_text()
    assert config.train.batch_tokens % (ranks * config.train.micro_batch * config.train.sequence_length) == 0
    assert "  photo.png: it is a PNG file\n" in output
    assert output.endswith("drover chat my-notes --interactive\n") and float(low) < float(bits) < float(high)
    text = Path("my-notes.yaml").read_text()
    assert "# Expected: about" in text and "but would be more than 2.8 epochs of the text.\n" in text
    Path("runs/large").mkdir(parents=True)
    output = printed(capsys, main, str(notes), "--params", "110M", "--to", "large.yaml")
    assert "runs/large is there already, so this run is called large-2" in output and "is next to 110M; " in output
    assert "ln(parameters of the blocks): Kaplan et al. 2020" in Path("large.yaml").read_text()


def test_a_long_text_is_divided_into_documents(notes, monkeypatch):
    monkeypatch.setattr(survey, "LONG_BYTES", 1000)
    (notes / "crlf.txt").write_bytes(b"a day at the sea\r\n\r\nanother day\r\n" * 40)
    assert {kind.separator for kind in look(notes).sources} == {"\n", "\r\n\r\n"}


def test_sources_are_called_after_files_and_folders(tmp_path, monkeypatch):
    """Records with a URL are pages of the web; most of the text is theirs or not."""
    monkeypatch.chdir(tmp_path)
    for name, fields in {"news/a": ["content", "url"], "news/b": ["content", "url"], "Bücher.2": ["text"]}.items():
        (tmp_path / f"mine/{name}.jsonl").parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / f"mine/{name}.jsonl").write_bytes(lines([dict.fromkeys(fields, wide(number))
                                                             for number in range(60)]))
    for number in range(6):
        (tmp_path / f"mine/{number}.md").write_text(wide(number))
    assert main(["mine"]) == 0
    config = load_config("mine.yaml")
    assert {own.name: own.meta_fields for own in config.shard.sources} == {
        "mine": [], "news": ["url"], "Buecher": []}
    assert config.shard.near_duplicates.preset == "fineweb" and [own.kind for own in config.shard.filters] == [
        "normalization", "length", "gopher_repetition"]
    (tmp_path / "mine/Bücher.2.jsonl").rename("mine/c.jsonl")
    (tmp_path / "mine/news/c.jsonl").write_bytes(lines([{"body": wide(number)} for number in range(200)]))
    monkeypatch.setattr("drover.pipeline.core.errors.find_spec", lambda name: None)
    assert main(["mine", "--to", "more.yaml"]) == 0
    config = load_config("more.yaml")
    assert {own.name for own in config.shard.sources} == {"mine", "news", "c", "c-text"}
    assert config.shard.filters == [] and "near" not in Path("more.yaml").read_text()


def test_what_is_added_later_is_read_wherever_it_lies(notes):
    """An ending that no left-out file has, and none that is read in another way, is matched in the whole folder."""
    (notes / "first/term").mkdir(parents=True)
    for name in ("only.txt", "a.note", "b.note", "cut.json"):
        (notes / "first/term" / name).write_text("{" if name == "cut.json" else wide(1))
    (notes / "own.json").write_bytes(lines([{"text": wide(3)}]))
    assert main([str(notes)]) == 0
    for name in ("late.txt", "second.note", "other.json"):
        (notes / name).write_text(wide(2))
    names = {path.name for _, path in input_files(load_config("my-notes.yaml"))}
    assert {"own.json", "late.txt", "second.note"} < names and not {"other.json", "cut.json"} & names


def test_another_folder_s_sources_are_printed_for_a_file_that_is_there(notes, capsys):
    assert main([str(notes)]) == 0
    before = Path("my-notes.yaml").read_text()
    assert main([str(notes)]) == 2
    assert "my-notes.yaml is there already, and reads" in capsys.readouterr().err
    assert main([shutil.copytree(notes, "copy/my notes")]) == 2
    out, error = capsys.readouterr()
    assert "# left out: photo.png: " in out and "put the lines above at the end of `sources:`" in error
    Path("my-notes.yaml").write_text(before.replace("  sources:\n", f"  sources:\n{out}"))
    names = load_config("my-notes.yaml").source_names
    assert len({*names}) == len(names) == 2 * out.count("- kind: files")


def test_few_files_are_a_corpus_with_held_out_text(notes):
    assert main([str(notes), "--minutes", "1"]) == 0
    config = load_config("my-notes.yaml")
    assert config.shard.validation_rule == "tail" and len(config.shard.sources[0].paths) == 2
    assert config.train.prompts == ["On day 0.0 we", "On day 2.0 we", "On day 4.0 we"]


@pytest.mark.parametrize(("flops", "minutes", "params", "limit", "depth"), table("""
    1e11 -> 10 -> null -> epochs of the training text -> 2
    1e8 -> 0.1 -> null -> % of the training text -> 2
    1e11 -> 10 -> 30000000 -> epochs of the training text -> 8""", float, float, json.loads, str, int))
def test_what_the_text_or_the_time_allows(notes, flops, minutes, params, limit, depth):
    result = propose(look(notes), flops, minutes, params)
    assert limit in result.epochs and result.shape.layers == depth and not result.shape.problems()


def test_how_well_text_is_predicted_is_seen_in_many_records(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines([{"text": wide(number)} for number in range(90)]))
    assert look(tmp_path).gzip_bits < 0.5, "they differ by a number; the first one alone needs more"


def test_a_file_of_a_word_is_a_corpus_too(tmp_path):
    (tmp_path / "a.md").write_text("a")
    assert propose(look(tmp_path), 1e11, 10, None).steps == 20


@pytest.mark.parametrize(("arguments", "message"), table("""
    'my notes' --minutes 0 -> above 0
    'my notes' --params many -> above 0
    nowhere -> is no folder
    pictures -> photo.png: it is a PNG file
    'my notes' --to pictures -> pictures cannot be read: it is not a regular file""", shlex.split))
def test_what_cannot_be_is_refused(notes, arguments, message, capsys):
    (notes.parent / "pictures").mkdir()
    (notes.parent / "pictures/photo.png").write_bytes((notes / "photo.png").read_bytes())
    assert message in printed(capsys, main, *arguments, expect=2) and not (notes.parent / "my-notes.yaml").exists()
