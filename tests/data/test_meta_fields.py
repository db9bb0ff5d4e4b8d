"""Fields that a source keeps as meta: counted over all of its documents, and refused where no record has one."""

import pytest

from drover.launch.submit import main
from drover.pipeline.contract.manifest import read_manifest
from tests.data.source_files import batch, write_batches, write_jsonl
from tests.stages.test_shard import files_source, folder_of, run, write_config


def corpus(place, fields):
    """Records of which half have `url`, one of them null, and one in all `rare`; a line in each file is broken."""
    (place / "in").mkdir(exist_ok=True)
    for number in range(4):
        records = [{"text": f"text {number} {row} " * 20, **({"url": row or None} if row % 2 == 0 else {})}
                   for row in range(20)]
        records[0] |= {"text": ""} | ({"rare": 1} if number == 3 else {})
        write_jsonl(place / f"in/{number}.jsonl", [*records, ["no object"]])
    return write_config(place, [files_source("web", place / "in" / "*.jsonl", meta_fields=fields)],
                        shard_mb=0.001, heldout_share=0.2, max_rejected_share=0.5)


def said(capsys):
    """What was printed, its lines joined."""
    return " ".join("".join(capsys.readouterr()).split())


def test_fields_are_counted_over_all_units_and_one_of_no_record_is_refused(tmp_path, capsys):
    config = corpus(tmp_path, ["url", "ulr"])
    assert run(config) == 2
    told = said(capsys)
    assert "source web: none of the 80 records that could be read has a field named ulr" in told
    assert "meta_fields" in told and not list(folder_of(config).rglob("*.tar"))
    for fields, counted in (([], None), (["url", "rare"], {"url": {"in": 40, "of": 80}, "rare": {"in": 1, "of": 80}})):
        corpus(tmp_path, fields)
        assert run(config, f"name=b{len(fields)}") == 0
        told, card = said(capsys), read_manifest(folder_of(config, f"b{len(fields)}")).counts["cards"]["web"]
        assert card.get("fields") == counted and ("meta field" in told) == bool(fields)
    assert "source web: meta field url in 40 of 80 documents" in told


def write_columns(place, ending, number, names):
    place.mkdir(exist_ok=True)
    columns = [(name, [f"{name} {number} {row} " * 9 for row in range(30)]) for name in names]
    if ending != "csv":
        return write_batches(place / f"{number}.{ending.split()[0]}", batch(*columns), stream=" " in ending)
    rows = [names, *zip(*(values for _, values in columns), strict=True)]
    return (place / f"{number}.csv").write_text("".join(",".join(row) + "\n" for row in rows))


@pytest.mark.parametrize("ending", ["parquet", "arrow", "arrow stream", "csv"])
def test_a_column_of_no_file_is_refused_before_anything_is_read(tmp_path, ending, capsys):
    """A file that cannot be looked into is left to the reading."""
    for number in range(2):
        write_columns(tmp_path / "in", ending, number, ["text", "url"])
    source = files_source("tables", tmp_path / "in" / "*", meta_fields=["url", "lang"])
    config = write_config(tmp_path, [source], heldout_share=0.2, max_rejected_share=1.0)
    assert run(config) == 2
    told = said(capsys)
    assert "source tables: none of its 2 files has a column named lang; the columns of 1." in told
    assert "are text, url." in told and "Correct text_field, id_field or meta_fields" in told
    assert main(["--stage", "shard", "--config", str(config), "--cluster", "local", "name=b"]) == 2
    assert "has a column named lang" in said(capsys) and not folder_of(config, "b").exists()
    assert not (folder_of(config) / "units").exists()
    (tmp_path / "in/3.parquet").write_bytes(b"PAR1 cut off")
    assert run(config) == 2
    assert (folder_of(config) / "rejected.jsonl").read_text().count("no column named lang") == 2
    write_columns(tmp_path / "in", ending, 2, ["text", "url", "lang"])
    assert run(config) == 0
    counts = read_manifest(folder_of(config)).counts
    assert counts["train"] + counts["heldout"] == 30
    assert counts["cards"]["tables"]["fields"]["lang"] == {"in": 30, "of": 30}
