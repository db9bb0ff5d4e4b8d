"""Fields that a source keeps as meta: counted over all of its documents, and refused where no record has one."""

import pytest

from drover.launch.submit import main
from tests.data.source_files import batch, file_bytes, write_batches, write_jsonl
from tests.stages.test_shard import files_source, finished, folder_of, run, write_config


def output(capsys):
    """What was printed, its lines joined."""
    return " ".join("".join(capsys.readouterr()).split())


def test_fields_are_counted_over_all_units_and_one_of_no_record_is_refused(tmp_path, capsys):
    """Half of the records have `url`, one of them null, and one in all has `rare`; a line in each file is broken."""
    for number in range(4):
        records = [{"text": f"text {number} {row} " * 20, **({"url": row or None} if row % 2 == 0 else {})}
                   for row in range(20)]
        records[0] |= {"text": ""} | ({"rare": 1} if number == 3 else {})
        write_jsonl(tmp_path / f"{number}.jsonl", [*records, ["no object"]])
    config = write_config(tmp_path, [files_source("web", tmp_path / "*.jsonl", meta_fields=["url", "ulr"])],
                          shard_mb=0.001, validation_share=0.2, max_rejected_share=0.5)
    assert run(config) == 2
    printed = output(capsys)
    assert "source web: none of the 80 records that could be read has a field named ulr" in printed
    assert "meta_fields" in printed and not list(folder_of(config).rglob("*.tar"))
    assert finished(config, "shard.sources.0.meta_fields=[url, rare]").counts["cards"]["web"]["fields"] == {
        "url": {"in": 40, "of": 80}, "rare": {"in": 1, "of": 80}}
    assert "source web: meta field url in 40 of 80 documents" in output(capsys)


@pytest.mark.parametrize("kind", ["parquet", "arrow stream", "csv"])
def test_a_column_of_no_file_is_refused_before_anything_is_read(tmp_path, kind, capsys):
    """A file that cannot be looked into is left to the reading."""
    (tmp_path / "in").mkdir()
    for number in range(2):
        (tmp_path / f"in/{number}.{kind.split()[0]}").write_bytes(file_bytes(kind, tmp_path))
    (tmp_path / f"in/00.{kind.split()[0]}").touch()  # has no columns, and no rows
    source = files_source("tables", tmp_path / "in" / "*", meta_fields=["name", "lang"])
    config = write_config(tmp_path, [source], validation_share=0.2, max_rejected_share=1.0)
    assert run(config) == 2
    printed = output(capsys)
    assert "source tables: none of its 3 files has a column named lang; the columns of 1." in printed
    assert "are text, name, stars." in printed and not (folder_of(config) / "units").exists()
    assert main(["--stage", "shard", "--config", str(config), "--cluster", "local", "name=b"]) == 2
    assert "has a column named lang" in output(capsys) and not folder_of(config, "b").exists()
    texts = [f"text {row}" for row in range(30)]
    write_batches(tmp_path / "in/2.parquet", batch(*((name, texts) for name in ("text", "name", "lang"))))
    card = finished(config).counts["cards"]["tables"]
    assert card["fields"]["lang"] == {"in": 30, "of": card["documents"]} == {"in": 30, "of": 30}
