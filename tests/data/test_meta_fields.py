"""Fields that a source keeps as meta: counted over all of its documents, and refused where no record has one."""

import json
import shutil
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.contract.manifest import read_manifest
from tests.stages.test_shard import REPOSITORY, files_source, folder_of, kill_at, run, start, write_config


def write_lines(folder, name, records):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records))


def corpus(place, fields, files=4, **settings):
    """Records of which half have `url`, one of them null, and one in all `rare`; a line in each file is broken."""
    for number in range(files):
        records = [{"text": f"text {number} {row} " * 20, **({"url": row or None} if row % 2 == 0 else {})}
                   for row in range(20)]
        records[0] |= {"text": ""} | ({"rare": 1} if number == files - 1 else {})
        write_lines(place / "in", f"{number}.jsonl", [*records, ["no object"]])
    return write_config(place, [files_source("web", place / "in" / "*.jsonl", meta_fields=fields)],
                        shard_mb=0.001, heldout_share=0.2, max_rejected_share=0.5, **settings)


def test_fields_are_counted_over_all_units_of_a_source(tmp_path, capsys):
    config = corpus(tmp_path, ["url", "rare"])
    assert run(config) == 0
    fields = read_manifest(folder_of(config)).counts["cards"]["web"]["fields"]
    assert fields == {"url": {"in": 40, "of": 80}, "rare": {"in": 1, "of": 80}}
    told = capsys.readouterr().out
    assert "source web: meta field url in 40 of 80 documents" in told
    assert "source web: meta field rare in 1 of 80 documents" in told


def test_counts_and_bytes_are_the_same_after_a_kill_and_for_parts(tmp_path):
    config = corpus(tmp_path, ["url", "rare"])
    assert run(config) == 0
    whole = read_manifest(folder_of(config))
    kill_at(lambda: start(config, "name=killed"), folder_of(config, "killed"), "units", 2)
    assert run(config, "name=killed", "launch.processes=2") == 0
    for part in ("0/2", "1/2"):
        assert run(config, "name=parts", "--part", part, "--phase", "read") == 0
    assert run(config, "name=parts") == 0
    for name in ("killed", "parts"):
        made = read_manifest(folder_of(config, name))
        assert (made.counts, made.digest) == (whole.counts, whole.digest)


def test_a_field_of_no_record_is_refused_with_its_source_and_corrected_without_force(tmp_path, capsys):
    config = corpus(tmp_path, ["url", "ulr"])
    assert run(config) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "source web: none of the 80 records that could be read has a field named ulr" in told
    assert "meta_fields" in told and not list(folder_of(config).rglob("*.tar"))
    config = corpus(tmp_path, ["url"])
    assert run(config) == 0


def test_a_source_without_meta_fields_says_nothing_of_them(tmp_path, capsys):
    config = corpus(tmp_path, [])
    assert run(config) == 0
    assert "meta field" not in capsys.readouterr().out
    assert "fields" not in read_manifest(folder_of(config)).counts["cards"]["web"]


def test_units_that_an_older_version_read_are_not_counted(tmp_path):
    config = corpus(tmp_path, ["url"])
    assert run(config, "--part", "0/1", "--phase", "read") == 0
    units = folder_of(config) / "units" / "read"
    path = sorted(units.rglob("*.json"))[0]
    record = json.loads(path.read_text())
    del record["fields"]
    path.write_text(json.dumps(record))
    assert run(config) == 0
    assert "fields" not in read_manifest(folder_of(config)).counts["cards"]["web"]


def write_columns(place, ending, number, names):
    place.mkdir(exist_ok=True)
    table = pa.table({name: [f"{name} {number} {row} " * 9 for row in range(30)] for name in names})
    path = place / f"{number}.{ending}"
    if ending == "parquet":
        pq.write_table(table, path)
    elif ending == "arrow":
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    else:
        rows = [names, *(list(row.values()) for row in table.to_pylist())]
        path.write_text("".join(",".join(row) + "\n" for row in rows))


@pytest.mark.parametrize("ending", ["parquet", "arrow", "csv"])
def test_a_column_of_no_file_is_refused_before_anything_is_read(tmp_path, ending, capsys):
    for number in range(2):
        write_columns(tmp_path / "in", ending, number, ["text", "url"])
    source = files_source("tables", tmp_path / "in" / "*", meta_fields=["url", "lang"])
    config = write_config(tmp_path, [source], heldout_share=0.2)
    assert run(config) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "source tables: none of its 2 files has a column named lang; the columns of 1." in told
    assert "are text, url." in told and "Correct text_field, id_field or meta_fields" in told
    assert not (folder_of(config) / "units").exists()
    write_columns(tmp_path / "in", ending, 2, ["text", "url", "lang"])
    assert run(config, "shard.max_rejected_share=0.9") == 0
    counts = read_manifest(folder_of(config)).counts
    assert counts["train"] + counts["heldout"] == 30
    assert counts["cards"]["tables"]["fields"]["lang"] == {"in": 30, "of": 30}


def test_what_cannot_be_looked_into_is_left_to_the_reading(tmp_path):
    write_columns(tmp_path / "in", "parquet", 0, ["text"])
    shutil.copy(tmp_path / "in" / "0.parquet", tmp_path / "in" / "1.parquet")
    (tmp_path / "in" / "1.parquet").write_bytes(b"PAR1 cut off")
    source = files_source("tables", tmp_path / "in" / "*", meta_fields=["lang"])
    config = write_config(tmp_path, [source], heldout_share=0.2)
    assert run(config) == 2
    assert (folder_of(config) / "rejected.jsonl").read_text().count("no column named lang") == 1


def test_the_launcher_refuses_a_column_of_no_file(tmp_path):
    write_columns(tmp_path / "in", "parquet", 0, ["text"])
    config = write_config(tmp_path, [files_source("tables", tmp_path / "in" / "*", meta_fields=["lang"])])
    done = subprocess.run([sys.executable, str(REPOSITORY / "launch" / "submit.py"), "--stage", "shard", "--config",
                           str(config), "--cluster", "local"], capture_output=True, text=True)
    assert done.returncode == 2 and "has a column named lang" in " ".join(done.stderr.split())
    assert not folder_of(config).exists()
