"""Sources of tokens in the stages: documents, splits, counts, refusals, and the same training as from text."""

import re

import numpy as np
import pytest
import yaml

from drover.launch.submit import main as submit
from drover.pipeline.contract.run import run_in
from drover.pipeline.tokenization.texts import shard_texts
from drover.pipeline.tokenization.tokenizer import load_tokenizer
from drover.tools.export_tokens import main as export
from drover.tools.trace.__main__ import main as trace
from drover.tools.verify import verify
from tests.conftest import run_stage, write_config
from tests.refusal import printed
from tests.stages.here import run_here
from tests.stages.training import curve, manifest_of
from tests.token_shards import shards_in

TEXTS = [f"Document {number}: " + "größer\n" * (number % 7) for number in range(300)]


def token_config(folder, sources, texts=(), **changes):
    """A configuration whose tokens come from files; bytes are ids of the tokenizer `byte`."""
    path = folder / "mini.yaml"
    path.write_text(yaml.safe_dump({
        "name": "mini", "runs_dir": str(folder / "runs"), "launch": {"processes": 1}, "tokenizer": {"kind": "byte"},
        "shard": {"sources": list(texts), "validation_share": 0.2}, "encode": {"sources": sources}, **changes}))
    return path


def nano(folder, name="a.bin", texts=TEXTS, kind="<u2"):
    """nanoGPT's file."""
    np.array([token for text in texts for token in (*text.encode(), 257)], kind).tofile(folder / name)
    return str(folder / name)


def stages(config, *overrides, through="encode"):
    for stage in ("shard", "tokenizer", "encode"):
        if (status := run_here(stage, config, *overrides)) or stage == through:
            return status


def texts_in(config, split):
    """What evaluation reads: the text of each document, whatever its source."""
    return sorted(text for shard in shard_texts(run_in(config.parent / "runs/mini"), split)
                  for _, text in shard.read(None))


def documents_in(config, split, source="a"):
    """Key, bytes of text and text of each document."""
    run = config.parent / "runs/mini"
    tokenizer = load_tokenizer(run / "tokenizer")
    shards = shards_in(run / "encode", manifest_of(config, "encode").outputs, split, source)
    return [(shard.document_key(number), shard.document_bytes(number),
             tokenizer.decode(shard.document_tokens(number))) for shard in shards for number in range(shard.documents)]


def test_documents_of_both_kinds_of_sources_become_token_shards(tmp_path, capsys):
    (tmp_path / "t.txt").write_text("\n---\n".join(TEXTS[::-1]))
    text = {"kind": "files", "name": "t", "paths": [str(tmp_path / "t.txt")], "separator": "\n---\n"}
    config = token_config(tmp_path, [{"name": "a", "paths": [nano(tmp_path)], "validation_share": 0.1}], [text])
    assert stages(config) == 0
    train, held = (documents_in(config, split) for split in ("train", "validation"))
    assert sorted(text for _, _, text in (*train, *held)) == sorted(TEXTS) and 15 < len(held) < 50
    every = [*texts_in(config, "train"), *texts_in(config, "validation")]
    assert {*every} == {*TEXTS} and len(every) == 2 * len(TEXTS)
    assert all(size == len(text.encode()) for _, size, text in (*train, *held))
    assert [text for _, _, text in train] == [text for text in TEXTS if text in {text for _, _, text in train}]
    made, said = manifest_of(config, "encode"), capsys.readouterr().out
    taken = made.counts["taken"]["a"]
    assert taken["docs"] == len(TEXTS) == taken["separators"] and taken["sampled"] == taken["encoded_again"] > 100
    assert taken["example"] == "Document 0: " and "the first begins 'Document 0: '" in said
    assert made.counts["splits"]["train"].keys() == {"a", "t"}
    assert not verify(tmp_path / "runs/mini", documents=True).problems
    assert "up to date" in (run_here("encode", config), capsys.readouterr().out)[1]
    key = next(key for key, _, text in train if "größer" in text)
    assert ": größer" in printed(capsys, trace, "--run", tmp_path / "runs/mini", "--document", key, "--text")
    nano(tmp_path, texts=TEXTS[:-1])
    assert run_here("encode", config) == 2 and "a/train/a.bin" in capsys.readouterr().err


def test_files_of_validation_are_not_trained_on(tmp_path):
    nano(tmp_path, "train.bin", TEXTS[:200]), nano(tmp_path, "val.bin", TEXTS[200:])
    config = token_config(tmp_path, [{"name": "a", "paths": [f"{tmp_path}/*.bin"],
                                      "validation_paths": [f"{tmp_path}/val.bin"]}])
    assert stages(config) == 0
    assert [text for _, _, text in documents_in(config, "train")] == TEXTS[:200]
    assert [text for _, _, text in documents_in(config, "validation")] == TEXTS[200:]


def test_ids_of_another_vocabulary_are_refused_or_pointed_out(tmp_path, capsys):
    stage = token_config(tmp_path, [{"name": "a", "paths": [nano(tmp_path)]}])
    for wrong, kind in ((600, "u2"), (-1, "i2")):
        np.save(tmp_path / "a.npy", np.array([5, 6, wrong, 257], kind))
        (tmp_path / "a.npy").rename(tmp_path / "a.bin")
        assert stages(stage) == 2
        assert f"a.bin has the id {wrong}, but the vocabulary" in capsys.readouterr().err
    np.array([*np.random.default_rng(1).integers(128, 256, 4000), 257], "<u2").tofile(tmp_path / "a.bin")
    assert stages(stage) == 0
    assert "They are probably of another tokenizer than tokenizer.path" in capsys.readouterr().out


def test_what_cannot_be_is_refused_before_anything_runs(tmp_path, capsys):
    nano(tmp_path, "a.tok")
    for sources, overrides, message in (
            ([], [], "shard.sources and encode.sources are both empty"),
            (["a.bin"], ["tokenizer.kind=bpe"], "are ids of a tokenizer that exists, but tokenizer.path"),
            (["a.bin"], ["shard.sources=[{kind: stdlib, name: a}]"],
             "shard.sources with encode.sources has 2 sources named 'a'"),
            (["b.bin"], [], "b.bin (looked for"), (["a.tok"], [], "do not show their format, such as a.tok")):
        config = token_config(tmp_path, [{"name": "a", "paths": [str(tmp_path / path)]} for path in sources])
        assert run_here("shard", config, *overrides) or run_here("tokenizer", config) or run_here("encode", config) == 2
        assert message in capsys.readouterr().err


def test_documents_of_tokens_are_traced_by_key(tmp_path, capsys):
    config = token_config(tmp_path, [{"name": "a", "paths": [nano(tmp_path)]}])
    stages(config)
    for name in ("a.bin:3", "t:3"):
        assert "The documents of a came as tokens, without an id" in printed(
            capsys, trace, tmp_path / "runs/mini", "--id", name, expect=2)


def test_damaged_headers_are_refused_with_the_plan(tmp_path, capsys):
    config = token_config(tmp_path, [{"name": "a", "paths": [nano(tmp_path), str(tmp_path / "b.bin")]}])
    np.array([20240520, 1, 9], "<i4").tofile(tmp_path / "b.bin")
    error = printed(capsys, submit, config, "--stage", "all", "--cluster", "local", "--dry-run", expect=2)
    assert "b.bin is cut or not what its name says: its header of llm.c has" in error and "a.bin" not in error


@pytest.mark.slow
def test_exported_tokens_train_as_those_that_were_made_here(tmp_path, corpus, capsys):
    """Of a sentencepiece vocabulary, in both formats: the same documents, text bytes and losses."""
    folder = tmp_path / "text"
    folder.mkdir()
    first = write_config(folder, corpus, **(measured := {"train": {"validation_tokens": 10**6}}))  # keys are others
    assert stages(first) == 0
    run_stage("train", first)
    run = folder / "runs/mini"
    for form, ending in (("megatron", "bin"), ("hf", "parquet")):
        for split in ("train", "validation"):
            printed(capsys, export, "--run", run, "--out", tmp_path / form / split, "--split", split, "--format", form)
        place = tmp_path / form
        source = {"name": "code", "paths": [f"{place}/train/code.{ending}"],
                  "validation_paths": [f"{place}/validation/code.{ending}"]}
        again = write_config(place, corpus, **measured, tokenizer={"path": str(run / "tokenizer/tokenizer.model")})
        config = yaml.safe_load(again.read_text())
        again.write_text(yaml.safe_dump({**config, "shard": {"sources": []}, "encode": {"sources": [source]}}))
        capsys.readouterr()
        assert stages(again) == 0
        said = capsys.readouterr().out
        assert " ids; there is no text to check it on\n" in said and not re.search(r"\b0/0|\b0 valid|0\.0 MB", said)
        counts = [manifest_of(config, "encode").counts for config in (first, again)]
        assert counts[0]["splits"] == counts[1]["splits"] and counts[0]["total"] == counts[1]["total"]
        assert counts[1]["taken"]["code"]["docs"] == counts[0]["total"]["docs"]
        assert all(texts_in(again, split) == texts_in(first, split) for split in ("train", "validation"))
        run_stage("train", again)
        assert curve(again) == curve(first)
