"""Documents in which items of evaluation sets stand: which are found, in whatever files the items lie, and what the
stage makes of it."""

import json
from ast import literal_eval

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from drover.pipeline.core.errors import UserError
from drover.pipeline.data import item_index
from drover.pipeline.data.documents import Document
from drover.pipeline.data.filters.decontamination import MOST_IN_META, OUTPUT
from drover.pipeline.data.item_index import ItemIndex, comparable_words
from tests.conftest import REPOSITORY
from tests.data.filters.test_kinds import made, outcome
from tests.data.source_files import lines, write_batches, write_jsonl
from tests.refusal import table
from tests.stages.test_shard import documents, files_source, finished, folder_of, run, write_config


def plainly(items, n, least, text):
    """Which items a text holds, by looking at every place."""
    def grams(words, size):
        return {tuple(words[place:place + size]) for place in range(len(words) - size + 1)}
    return [number for number, item in enumerate(map(comparable_words, items)) if len(item) >= least
            and grams(item, min(n, len(item))) & grams(comparable_words(text), min(n, len(item)))]


MIXED = item_index.mixed
FEW_WORDS = st.lists(st.sampled_from(["a", "B", "c,", "Straße", "x"]), max_size=9).map(" ".join)


@settings(max_examples=300)
@given(st.lists(FEW_WORDS, max_size=6), st.integers(1, 5), st.integers(1, 4), FEW_WORDS, st.booleans())
def test_it_finds_what_looking_at_every_place_finds(monkeypatch, items, n, least, text, collide):
    """Also where all words have one hash, so that the words must decide."""
    monkeypatch.setattr(item_index, "mixed", np.ones_like if collide else MIXED)
    index = ItemIndex(items, n, least)
    assert index.items_in(text) == plainly(items, n, least, text)
    assert index.too_short.tolist() == [len(comparable_words(item)) < least for item in items]


def test_spelling_and_places_do_not_matter_and_other_words_do():
    index = ItemIndex(["Which planet is nearest to the Sun? Mercury, by far: always, ever and on.", "too short"], 13, 8)
    item = "which PLA\u00adNET&nbsp;is\u00a0\nnearest-to the \ufeffs&shy;un mercury by far (always) ever & ”and”"
    assert index.items_in(f"before &quot;{item}&quot; behind") == [0]
    for text in (item.replace("far", "near"), " ".join(item.split()[:-1]), "too short"):
        assert index.items_in(text) == []


WITHOUT_SPACES = {
    "Chinese": ("小明有五个苹果他给了小红两个请问他还剩下几个苹果答案是多少", "前面接着{}后面接着"),
    "Japanese": ("太郎はりんごを五つ持っていて、花子に二つあげました。いくつ残っていますか", "昔の話{}と書いてある"),
    "Thai": ("สมชายมีแอปเปิ้ลห้าลูกเขาให้น้องสองลูกเขาเหลือแอปเปิ้ลกี่ลูก", "ครูถามว่า{}แล้วทุกคนก็ตอบ"),
    "Lao": ("ສົມຊາຍມີໝາກໂປມຫ້າໜ່ວຍລາວໃຫ້ນ້ອງສອງໜ່ວຍລາວຍັງເຫຼືອຈັກໜ່ວຍ", "ຄູຖາມວ່າ{}ແລ້ວທຸກຄົນຕອບ"),
    "Khmer": ("សុខមានផ្លែប៉ោមប្រាំហើយឱ្យប្អូនពីរតើគាត់នៅសល់ផ្លែប៉ោមប៉ុន្មាន", "គ្រូសួរថា{}ហើយគេឆ្លើយ"),
    "Burmese": ("မောင်မောင်မှာပန်းသီးငါးလုံးရှိပြီးညီမလေးကိုနှစ်လုံးပေးလိုက်တယ်", "ဆရာက{}လို့မေးတယ်"),
    "Tibetan": ("བཀྲ་ཤིས་ལ་ཀུ་ཤུ་ལྔ་ཡོད་པ་ལས་གཉིས་བྱིན་ན་ད་དུང་ཀུ་ཤུ་ག་ཚོད་ལྷག་གམ", "དགེ་རྒན་གྱིས་{}་ཞེས་དྲིས"),
    "mixed": ("小明买了iPhone15和MacBook一共花了20000元请问iPhone多少钱", "据说{}这是考题"),
}


@pytest.mark.parametrize("script", WITHOUT_SPACES)
def test_items_are_found_in_scripts_without_spaces(script):
    """Also with other punctuation and lines. Another text of the script, and the item's first words, are no item."""
    item, around = WITHOUT_SPACES[script]
    others = [other for name, (other, _) in WITHOUT_SPACES.items() if name != script]
    index = ItemIndex([*others, item], 13, 8)
    number = len(others)
    assert index.items_in(around.format(item)) == index.items_in(around.format("\n「".join(item.partition(item[9])))) \
        == [number]
    assert index.items_in(around.format(item[:8])) == []
    assert not index.too_short.any()


def test_three_letters_of_thai_are_a_word_and_a_character_of_chinese_is_one():
    thai, chinese = "กขคงจฉชซฌญฎฏฐฑฒณดตถทธนบปผฝพฟภมยรลวศษสหฬอฮ", "天地玄黄宇宙洪荒日月盈昃辰宿列张"
    index = ItemIndex([thai, thai[:24], thai[:23], chinese, chinese[:8], chinese[:7]], 13, 8)
    assert index.too_short.tolist() == [False, False, True, False, False, True]
    assert index.items_in(thai[1:40]) == [0] and index.items_in(thai[1:39]) == []
    assert index.items_in(chinese[1:14]) == [3] and index.items_in(chinese[1:13]) == []


ITEM = "how many legs has a spider that has lost two of them in the rain"
RECORDS = [{"question": ITEM, "answer": "six legs", "tags": ["easy", "nature"],
            "legs": 6, "more": {"of": ["spider", "mites"]}, "raw": "6 legs"},
           {"question": "what is the sum of all the numbers from one up to ten, both of them counted in",
            "answer": "fifty five", "tags": [], "legs": None, "more": {"of": []}, "raw": ""}]


def write_sets(folder):
    """The records in files of two formats."""
    write_jsonl(folder / "set.jsonl", RECORDS)
    (folder / "set.csv").write_text("question,answer\n" + "".join(
        f'"{record["question"]}",{record["answer"]}\n' for record in RECORDS))
    for kind in ("parquet", "arrow"):
        write_batches(folder / f"set.{kind}", pa.RecordBatch.from_pylist(
            [{**record, "raw": record["raw"].encode()} for record in RECORDS]))


def filter_of(*files, **options):
    """Files are given as a path and the fields."""
    files = [{"path": str(path), "fields": fields} for path, fields in files]
    return made(kind="decontamination", files=files, **options)


@pytest.mark.parametrize("name", ["set.jsonl", "set.parquet", "set.arrow"])
@pytest.mark.parametrize(("fields", "text"), [
    (["tags", "answer"], "easy nature six legs"), (["legs", "answer"], "6 six legs"),
    (["more.of", "raw"], "spider mites 6 legs")])
def test_a_field_may_be_a_list_a_number_or_within_another(tmp_path, name, fields, text):
    write_sets(tmp_path)
    own = filter_of((tmp_path / name, fields), n=4, min_words=1)
    assert outcome(own, text) == "contains items of set"
    assert own.findings() == {"set": {"": 1, f"{name}:1": 1}}


def test_a_flagged_document_names_tasks_and_items_and_keeps_its_text(tmp_path):
    many = tmp_path / "many.jsonl"
    write_jsonl(many, [{"text": ITEM}] * (MOST_IN_META + 2))
    write_sets(tmp_path)
    own = filter_of((many, ["text"]), (tmp_path / "set.jsonl", ["question", "tags"]), action="flag")
    after = own(Document(f"{ITEM}\n\n{ITEM}", "s", "1", {"stars": 3}))
    assert after == Document(f"{ITEM}\n\n{ITEM}", "s", "1", {"stars": 3, "contamination": {
        "many": [f"many.jsonl:{number + 1}" for number in range(MOST_IN_META)], "set": ["set.jsonl:1"]}})
    result = own.summary(own.findings())
    assert result["many"]["found"] == MOST_IN_META + 2 and result["many"]["documents"] == 1
    assert (result["set"]["action"], result["set"]["which"]) == ("flag", {"set.jsonl:1": 1})


def test_a_task_is_read_as_its_file_says():
    task = REPOSITORY / "configs/tasks/python_line.yaml"
    own = filter_of((task, []), n=9, min_words=9)
    assert own.reads() == [task, task.with_suffix(".jsonl")]
    right = 'class Node:\n    def __init__(self, value):\n        self.value = value\n'
    assert outcome(own, right) == "contains items of python_line"
    assert outcome(own, "class Node: def __init__(self, value): value self value") is None


@pytest.mark.parametrize(("name", "content", "fields", "message"), table(r"""
    a.jsonl -> '{"q": "x"}\n' -> ["question"] -> no field question at record 1; the fields are q
    a.jsonl -> '{"q": {"a": 1}}\n' -> ["q.b"] -> no field q.b at record 1; the fields are a
    a.jsonl -> '{"q": "x"}\n{"q"' -> ["q"] -> cannot be read at record 2
    a.jsonl -> "[1]\n" -> ["q"] -> no fields
    a.csv -> "p,q\n1,2\n" -> ["r"] -> no column named r
    a.parquet -> "PAR1" -> ["q"] -> cannot be read
    a.yaml -> "task: x\n" -> [] -> names no data files
    a.yaml -> "dataset_kwargs: {data_files: {test: b-*.jsonl}}\n" -> [] -> no file matches
    a.jsonl -> "" -> [] -> `fields` is missing
    a.txt -> "" -> ["x"] -> is no file of items""", str, literal_eval, literal_eval))
def test_files_that_are_no_sets_are_refused(tmp_path, name, content, fields, message):
    (tmp_path / name).write_text(content)
    with pytest.raises((UserError, ValidationError), match=message):
        filter_of((tmp_path / name, fields)).open()


def test_equal_names_in_one_task_are_refused(tmp_path):
    for folder in ("one", "two"):
        write_sets(tmp_path / folder)
    with pytest.raises(UserError, match=r"set\.jsonl:1 of the task set twice"):
        filter_of(*((tmp_path / folder / "set.jsonl", ["question"]) for folder in ("one", "two"))).open()


@pytest.fixture
def corpus(tmp_path):
    """Documents in several units, some of which hold an item; and their configuration."""
    write_sets(tmp_path / "sets")
    for number in range(4):
        texts = [f"document {number} {row} of a corpus without any question" for row in range(30)]
        texts += [f"In {number} they asked {ITEM}, it is said"] + [RECORDS[1]["question"]] * (number == 2)
        write_jsonl(tmp_path / f"in/{number}.jsonl", [{"text": text} for text in texts])
    wanted = [{"kind": "decontamination", "files": [
        {"path": str(tmp_path / "sets/set.jsonl"), "task": "spiders", "fields": ["question"]},
        {"path": str(tmp_path / "sets/set.csv"), "task": "answers", "fields": ["answer"]}]}]
    return write_config(tmp_path, [files_source("web", tmp_path / "in/*.jsonl")], shard_mb=0.002, validation_share=0.2,
                        filters=wanted)


def refused(capsys, config, *overrides):
    """What is said of a run that is refused."""
    capsys.readouterr()
    assert run(config, *overrides) == 2
    return "".join(capsys.readouterr())


def test_the_stage_counts_by_task_names_the_items_and_goes_by_their_content(corpus, tmp_path, capsys):
    manifest = finished(corpus)
    message = capsys.readouterr().out
    assert "filter decontamination: 2 of 2 items of spiders were found in 5 documents" in message
    assert "0 of 2 items of answers (2 are too short for a search) were found in 0 documents" in message
    assert manifest.counts["filters"]["decontamination"]["reasons"] == {"contains items of spiders": 5}
    rule = {"n": 13, "min_words": 8, "action": "drop", "items": 2}
    warning = manifest.counts["contamination"]["decontamination"]["answers"].pop("warning")
    assert "2 of 2 items of answers have fewer than 8 words and are not searched for" in warning
    assert message.index(f"warning: {warning}") < message.index("documents in =")
    assert message.count("fewer than 8 words") == 1
    assert manifest.counts["contamination"] == {"decontamination": {
        "spiders": {**rule, "too_short": 0, "documents": 5, "found": 2},
        "answers": {**rule, "too_short": 2, "documents": 0, "found": 0}}}
    result = json.loads((folder_of(corpus) / OUTPUT).read_text())["decontamination"]
    assert result["spiders"]["which"] == {"set.jsonl:1": 4, "set.jsonl:2": 1} and result["answers"]["which"] == {}
    kept = [document for split in ("train", "validation") for document in documents(corpus, split)]
    assert not any("spider" in document.text for document in kept)
    (tmp_path / "sets").rename(tmp_path / "moved")
    corpus.write_text(corpus.read_text().replace("/sets/", "/moved/"))
    assert run(corpus) == 0
    assert "up to date" in capsys.readouterr().out
    with (tmp_path / "moved/set.jsonl").open("ab") as file:
        file.write(lines([{"question": "document 1 2 of a corpus without any question", "answer": "1"}]))
    assert "filters/decontamination/set.jsonl" in refused(capsys, corpus)


def test_a_set_that_is_not_there_and_a_source_called_as_filters_files_are_refused(corpus, tmp_path, capsys):
    assert "A source of shard.sources is called filters" in refused(capsys, corpus, "shard.sources.0.name=filters")
    (tmp_path / "sets/set.csv").unlink()
    message = refused(capsys, corpus, "name=b", "shard.sources.0.paths=[nowhere.jsonl]")
    assert "nowhere.jsonl" in message and "the filter decontamination needs" in message
