"""The figures of the data benchmark: fair turns, ratios within a round, and what is not there is left out."""

import json

import pytest

from tools.bench_data import loading
from tools.bench_data.__main__ import corpus, main
from tools.bench_data.measuring import Taken, alternated, rows_of


def test_contenders_take_turns_and_the_order_turns_round():
    order = []

    def contender(name):
        def measure():
            order.append(name)
            return Taken(1.0, 1.0)
        return measure
    taken = alternated({name: contender(name) for name in "ab"}, 3)
    assert order == ["a", "b", "b", "a", "a", "b"] and [len(taken[name]) for name in "ab"] == [3, 3]


def test_a_ratio_is_the_median_of_ratios_within_a_round():
    ours, theirs = [Taken(1, 1), Taken(10, 1), Taken(2, 1)], [Taken(3, 2), Taken(40, 2), Taken(4, 2)]
    own, other = rows_of("encode", {"ours": ours, "theirs": theirs}, 20.0, "theirs",
                         {"ours": Taken(0.5, 0), "theirs": Taken(1, 0)})
    assert (own["wall_mb_per_s"], own["cpu_mb_per_s"], own["ratio_wall"], own["ratio_cpu"]) == (10, 20, 3, 2)
    assert own["net_mb_per_s"] == pytest.approx(20 / 1.5) and own["ratio_net"] == 4
    [unsure, _] = rows_of("encode", {"ours": ours, "theirs": theirs}, 20.0, "theirs",
                          {"ours": Taken(0.9, 0), "theirs": Taken(1, 0)})
    assert "ratio_net" not in unsure and "net_mb_per_s" not in unsure and unsure["ratio_wall"] == 3
    assert "ratio_wall" not in other and other["wall_mb_per_s"] == 5


def test_the_corpus_is_of_different_texts_up_to_a_size(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 20_000 + "y" * 100)
    (tmp_path / "b.txt").write_text("x" * 20_000 + "z" * 50)
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    assert [len(text) for text in corpus(files, 1.0)] == [20_000, 100, 50]
    assert [len(text) for text in corpus(files, 0.01)] == [20_000]
    assert sum(len(text.encode()) for text in corpus(None, 0.2)) >= 200_000


def test_what_is_measured_is_told_and_written(tmp_path, capsys):
    path = tmp_path / "out.json"
    assert main(["--mb", "1.5", "--rounds", "1", "--only", "shard,filters,minhash", "--json", str(path)]) == 0
    told, found = capsys.readouterr().out, json.loads(path.read_text())
    rows = [row for row in found["rows"] if row["section"] == "shard"]
    assert [row["name"] for row in rows] == ["1 process", "2 processes"]
    assert all(row["wall_mb_per_s"] > 0 for row in rows)
    assert found["text_mb"] >= 1.5 and found["versions"]["pyarrow"] and found["cores"] > 0
    assert "1 process" in told and {row["section"] for row in found["rows"]} == {"shard", "filters", "minhash"}


def test_what_cannot_be_measured_is_said(tmp_path, capsys):
    assert main(["--only", "encoding"]) == 2
    assert "does not know encoding; the sections are encode, shard" in capsys.readouterr().err
    assert main(["--text", str(tmp_path / "none.txt")]) == 2
    assert f"{tmp_path}/none.txt cannot be read" in capsys.readouterr().err


@pytest.mark.soak
def test_the_same_ids_as_datatrove(tmp_path):
    pytest.importorskip("datatrove")
    path = tmp_path / "out.json"
    assert main(["--mb", "1.5", "--vocab", "1024", "--rounds", "1", "--only", "encode", "--json", str(path)]) == 0
    *ours, theirs = json.loads(path.read_text())["rows"]
    assert theirs["tokens"] == theirs["our_tokens"] > 100_000 and all(row["ratio_wall"] > 0 for row in ours)


def test_the_loader_is_measured_beside_rows_in_tokens(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "TOKENS", 1 << 18)
    monkeypatch.setattr(loading, "SEQUENCES", 64)
    path = tmp_path / "out.json"
    assert main(["--mb", "0.1", "--rounds", "1", "--only", "loader", "--json", str(path)]) == 0
    told, rows = capsys.readouterr().out, json.loads(path.read_text())["rows"]
    assert [row["name"] for row in rows] == [f"{way}, batches of {batch}" for batch in (8, 32)
                                             for way in ("concatenated", "packed", "packed in a phase",
                                                         "memmap rows")]
    assert all(row["unit"] == "M tokens" and row["wall_mb_per_s"] > 0 for row in rows)
    assert "M tokens/s" in told and "best-fit packing: " in told and "of memmap rows, batches of 32" in told
