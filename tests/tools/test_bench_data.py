"""The figures of the data benchmark: fair turns, ratios within a round, and what is not there is left out."""

import json

import pytest

from tools.bench_data import loading
from tools.bench_data.__main__ import corpus, main
from tools.bench_data.measuring import Taken, alternated, rows_of


def test_contenders_take_turns_and_the_order_turns_round():
    order = []
    taken = alternated({name: lambda name=name: order.append(name) or Taken(1.0, 1.0) for name in "ab"}, 3)
    assert order == [*"abbaab"] and [len(taken[name]) for name in "ab"] == [3, 3]


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
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for file, end in zip(files, ("y" * 100, "z" * 50), strict=True):
        file.write_text("x" * 20_000 + end)
    assert [len(text) for text in corpus(files, 1.0)] == [20_000, 100, 50]
    assert [len(text) for text in corpus(files, 0.01)] == [20_000]
    assert sum(len(text.encode()) for text in corpus(None, 0.2)) >= 200_000


@pytest.mark.slow
def test_what_is_measured_is_told_and_written(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(loading, "TOKENS", 1 << 18)
    monkeypatch.setattr(loading, "SEQUENCES", 64)
    path = tmp_path / "out.json"
    assert main(["--mb", "1.5", "--rounds", "1", "--only", "shard,filters,minhash,loader", "--json", str(path)]) == 0
    found, told = json.loads(path.read_text()), capsys.readouterr().out
    assert {row["section"] for row in found["rows"] if row["wall_mb_per_s"] > 0} == {"shard", "filters", "minhash",
                                                                                      "loader"}
    assert found["text_mb"] >= 1.5 and "2 processes" in told and "of memmap rows, batches of 32" in told


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
