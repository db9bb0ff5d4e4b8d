"""The stage evaluate on a small run: text through the real first stages, a model of random weights."""

import gzip
import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from pipeline.config.loading import load_config
from pipeline.contract.entry import stage_main
from pipeline.contract.manifest import read_manifest
from pipeline.contract.run import Run
from pipeline.data.chosen_documents import ChosenDocuments, choose
from pipeline.data.shard_table import open_shards
from pipeline.data.text_shards import read_shard, shard_records
from pipeline.evaluate import evaluate
from pipeline.files import read_json
from tests.conftest import start_stage
from tests.stages.small_run import told_of
from tests.waiting import HANG_S


@pytest.fixture(scope="module")
def evaluated(small_run):
    """Results of a single process: (folder, results)."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert stage_main("evaluate", evaluate, ["--config", str(small_run)]) == 0
    finally:
        torch.set_num_threads(threads)
    folder = Run(load_config(small_run)).own_folder("evaluate")
    return folder, read_json(folder / "results.json")


def test_what_is_measured(small_run, evaluated):
    folder, results = evaluated
    run = Run(load_config(small_run))
    held = results["heldout"]
    for source in ("code", "prose"):
        texts = [document.text.encode() for record in shard_records(run.finished("shard"), "heldout", source)
                 for document in read_shard(run.stage_folder("shard"), record)]
        entry = held["sources"][source]
        assert (entry["documents"], entry["bytes"]) == (len(texts), sum(map(len, texts)))
        assert entry["targets"] == entry["bytes"] + len(texts), "bytes are tokens here, and each document has an EOS"
        assert entry["baselines"]["gzip -9"] == pytest.approx(
            8 * len(gzip.compress(b"".join(texts), 9)) / entry["bytes"], abs=1e-6)
        assert entry["bits_per_byte"] == pytest.approx(entry["nats"] / math.log(2) / entry["bytes"], abs=1e-5)
    assert results["tasks"]["words"]["items"] == 7
    assert [entry["prompt"] for entry in results["continuations"]] == ["def ", "x"]
    assert "words" in (folder / "results.md").read_text()


def test_the_exported_model_is_what_is_measured(small_run, evaluated):
    """The nats of one source by the simplest way: one document, one piece at a time, through transformers."""
    from transformers import AutoModelForCausalLM

    run = Run(load_config(small_run))
    model = AutoModelForCausalLM.from_pretrained(run.own_folder("convert") / "hf").eval()
    nats = 0.0
    for token_shard in open_shards(run.stage_folder("encode"), run.finished("encode").outputs, "heldout", "prose"):
        for number in range(token_shard.documents):
            ids = torch.from_numpy(token_shard.document_tokens(number).astype("int64"))
            for start in range(0, len(ids) - 1, 64):
                piece = ids[start:start + 65]
                with torch.no_grad():
                    scores = model(piece[None, :-1]).logits[0].double()
                nats += cross_entropy(scores, piece[1:], reduction="sum").item()
    assert evaluated[1]["heldout"]["sources"]["prose"]["nats"] == pytest.approx(nats, rel=1e-5)


def test_a_part_of_the_heldout_text_is_measured_and_said(small_run, evaluated, copied, tmp_path, capsys):
    """Another amount costs the figures of held-out text only, and is asked for without --force."""
    run, limit, folder = Run(load_config(small_run)), 200, tmp_path / "copy/evaluate"
    assert stage_main("evaluate", evaluate, [*copied, "evaluate.heldout_tokens=null"]) == 0
    assert read_json(folder / "results.json") == evaluated[1], "the default takes all of so little"
    capsys.readouterr()
    assert stage_main("evaluate", evaluate, [*copied, f"evaluate.heldout_tokens={limit}",
                                             "evaluate.compressed_mb=0.0001"]) == 0
    told = capsys.readouterr().out
    assert [told_of(told, part) for part in ("held-out text", "baselines", "task words", "continuations")] == [
        "measured", "measured", "kept", "kept"]
    results = read_json(folder / "results.json")["heldout"]
    for source, entry in results["sources"].items():
        whole = evaluated[1]["heldout"]["sources"][source]
        shards = open_shards(run.stage_folder("encode"), run.finished("encode").outputs, "heldout", source)
        chosen = [bytes(ids[1:-1].astype("uint8")) for ids in ChosenDocuments(shards, choose(shards, limit))]
        assert entry["documents"] == len(chosen) < entry["of_documents"] == whole["documents"]
        assert entry["bytes"] == sum(map(len, chosen)) and limit <= entry["tokens"] < entry["of_tokens"]
        assert 100 <= entry["compressed_bytes"] < entry["bytes"] and entry["baselines"] != whole["baselines"]
        assert f"{source}: measured on {len(chosen):,} of {whole['documents']:,} held-out documents" in told


@pytest.mark.parametrize("shards", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_two_ranks_write_the_same_bytes(small_run, evaluated, shards, capsys):
    """Also where neither holds the model: nothing but memory depends on that."""
    folder, _ = evaluated
    alone = {name: (folder / name).read_bytes() for name in ("results.json", "results.md")}
    process = start_stage("evaluate", small_run, "--force", f"evaluate.memory_gb={1 if shards == 1 else 1e-6}", ranks=2)
    said, complaint = process.communicate(HANG_S)
    assert process.wait() == 0, complaint
    assert {name: (folder / name).read_bytes() for name in alone} == alone
    counts = read_manifest(folder).counts
    assert (counts["ranks"], counts["dp_shard"]) == (2, shards)
    assert ("weights sharded over 2 ranks (FSDP2" in said) == (shards == 2)
    assert stage_main("evaluate", evaluate, ["--config", str(small_run)]) == 0
    assert "up to date" in capsys.readouterr().out


@pytest.mark.parametrize(("override", "message"), [
    (f"evaluate.prompts=['{'x' * 70}']", "leaves no room in the model's context of 64"),
    ("evaluate.tasks=[word]", "did you mean words"),
])
def test_what_cannot_be_measured_is_said(copied, override, message, capsys):
    assert stage_main("evaluate", evaluate, [*copied, override]) == 2
    assert message in capsys.readouterr().err
