"""Fields that a source keeps as meta: counted over all of its documents, and refused where no record has one."""

import tarfile

from tests.data.source_files import write_jsonl
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


def test_text_shards_that_are_read_again_keep_their_meta_fields_by_name(tmp_path):
    """So that a filter of sites knows a page by its url."""
    write_jsonl(tmp_path / "web.jsonl", [{"text": f"text {row}", "url": f"http://{'ab'[row % 2]}.org/{row}"}
                                         for row in range(20)])
    config = write_config(tmp_path, [files_source("web", tmp_path / "web.jsonl", meta_fields=["url"])],
                          validation_share=0.2)
    finished(config)
    for path in folder_of(config).glob("*/*.tar"):
        with tarfile.open(path) as tar:
            tar.extractall(tmp_path / "again", filter="data")
    counts = finished(write_config(tmp_path, [files_source("web", tmp_path / "again/*", id_field="url",
                                                           meta_fields=["url"])], validation_share=0.2,
                                   filters=[{"kind": "site", "drop": ["a.org"]}]), name="b").counts
    assert counts["dropped"]["site"] == counts["train"] + counts["validation"] == 10
