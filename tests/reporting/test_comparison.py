"""Several runs on one page."""

from operator import itemgetter

import pytest

from drover.pipeline.config.loading import save_config
from drover.pipeline.config.tree import Config, changed
from drover.pipeline.contract.manifest import Manifest
from drover.pipeline.contract.run import run_in
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import write_json
from drover.pipeline.records.checkpoint_scores import CheckpointScores, scores_path
from drover.pipeline.reporting.comparison import ComparedRun, compare_runs, data_tables
from drover.pipeline.reporting.document import Series
from drover.pipeline.reporting.experiment import SweepVariant
from tests.data.source_files import write_jsonl
from tests.reporting.made_up import config

STEPS = 3


def write_trained(runs_dir, name, tokenizer="t", steps=STEPS, **settings):
    """What training of so many steps leaves behind, each with a loss of `train.lr` above the next."""
    own = changed(config(runs_dir), {"name": name, "runs_dir": str(runs_dir), "train.steps": STEPS,
                                     **{key.replace("__", "."): value for key, value in settings.items()}})
    folder = runs_dir / name
    (folder / "train").mkdir(parents=True)
    save_config(own, folder / "config.yaml")
    made = [{"path": "hf", "bytes": 1, "sha256": tokenizer}]
    Manifest("tokenizer", {}, made, {"vocab_size": 512}, "").write(folder / "tokenizer")
    Manifest("encode", {}, [], {}, "").write(folder / "encode")
    write_jsonl(folder / "train/metrics.jsonl", [
        {"step": step, "tokens": 1000 * step, "loss": 5 - own.train.lr * step, "train_s": 2.0 * step,
         "validation_sample_bpb": {"prose": 3 - own.train.lr * step}} for step in range(1, steps + 1)])
    return folder


def chapter(document, title):
    """The blocks of a chapter."""
    found, = (part.blocks for part in document.chapters if part.title == title)
    return found


def test_curves_of_two_runs_stand_over_what_training_has_used(tmp_path):
    runs = [write_trained(tmp_path, "slow", train__lr=0.1), write_trained(tmp_path, "fast", train__lr=0.2)]
    page = compare_runs(runs)
    loss, validation = chapter(page, "Over tokens")
    assert [(line.name, list(line.x), list(line.y)) for line in loss.series] == [
        ("slow", [1000, 2000, 3000], pytest.approx([4.9, 4.8, 4.7])),
        ("fast", [1000, 2000, 3000], pytest.approx([4.8, 4.6, 4.4]))]
    assert validation.unit == "bits per byte" and list(validation.series[1].y) == pytest.approx([2.8, 2.6, 2.4])
    assert list(chapter(page, "Over time")[0].series[0].x) == pytest.approx([2 / 60, 4 / 60, 6 / 60])
    each, = {x / tokens for x, tokens in zip(chapter(page, "Over FLOPs")[0].series[0].x, loss.series[0].x, strict=True)}
    shape = Config.model_validate(config(tmp_path)).model.with_vocabulary(512)
    assert each == shape.flops_per_token(config(tmp_path).train.sequence_length, causal=False)
    assert page.result.startswith("Not all runs are evaluated: slow, fast.")
    assert not page.notices


def test_what_filters_changed_is_shown_with_documents_that_are_dropped_now(tmp_path):
    """Without training. Only rows in which something differs from zero; and not what both runs drop."""
    runs = []
    for name, dropped in {"lax": ["a"], "strict": ["a", "b"]}.items():
        folder = tmp_path / name
        save_config(changed(config(tmp_path), {"name": name}), folder / "config.yaml")
        Manifest("shard", {}, [], {"sources": {"web": {
            "documents_in": 9, "train": 9 - len(dropped), "validation": 0, "rejected": 0,
            "dropped": {"duplicate": 0, "length": len(dropped)},
            "filters": {"length": {"reasons": {"short": len(dropped)}}}}}}, "").write(folder / "shard")
        write_jsonl(folder / "shard/dropped/web-00000.jsonl", [
            {"source": "web", "id": one, "filter": "length", "reason": "short", "text": f"{one}\nb"}
            for one in dropped])
        runs.append(ComparedRun(name, run_in(folder)))
    table, new = data_tables(runs)
    assert [row for _, row in table.rows] == [
        ("web", "came in", "9", "9"), ("web", "dropped, length: short", "1", "2"), ("web", "kept, train", "8", "7")]
    assert [row for _, row in new.rows] == [("web/b", "length, short", "b b")]
    save_config(changed(config(tmp_path), {"name": "lax", "runs_dir": str(tmp_path), "shard.keep_dropped": False}),
                tmp_path / "lax/config.yaml")
    [_] = data_tables([ComparedRun("lax", run_in(tmp_path / "lax")), runs[1]])  # what it dropped is not known


def test_other_tokenizers_and_runs_in_training_are_named(tmp_path):
    runs = [write_trained(tmp_path, "a"), write_trained(tmp_path, "b", tokenizer="other", steps=1)]
    page = compare_runs(runs)
    assert "b is at step 1 of 3" in page.result
    assert "different tokenizers" in page.notices[0].text


def test_every_folder_without_training_is_refused_at_once(tmp_path):
    runs = [write_trained(tmp_path, "a"), write_trained(tmp_path, "b", steps=0), tmp_path / "none"]
    with pytest.raises(UserError) as raised:
        compare_runs(runs)
    assert str(runs[1]) in str(raised.value) and str(runs[2]) in str(raised.value)


def test_scores_of_checkpoints_stand_over_tokens(tmp_path):
    """Scores of checkpoints are drawn of the runs that have some."""
    runs = [write_trained(tmp_path, name) for name in ("scored", "unscored")]
    task = {"metrics": {"acc": {"value": 0.5, "stderr": 0.1}}, "chance": 0.25, "answer_bits_per_byte": None}
    for step in (2, STEPS + 1):
        write_json(scores_path(runs[0] / "train", step), vars(CheckpointScores(
            step, "", 1000 * step, None, {"overall": {"bits_per_byte": 2.5}}, {"lines": task})))
    text, lines, _, of_flops = chapter(compare_runs(runs), "Scores while training")
    assert text.series == [Series("scored", (2000,), (2.5,), errors=(0.0,))] and text.over == "tokens"
    assert text.note == "Only scored has this score."
    chance = Series("by chance", (2000, 2000), (0.25, 0.25), faint=True)
    assert lines.series == [chance, Series("scored", (2000,), (0.5,), errors=(0.1,))]
    assert lines.title == "lines, acc over tokens"
    assert lines.note == "Bands are standard errors. Only scored has this score."
    assert of_flops.over == "FLOPs" and of_flops.series[1].x > lines.series[1].x


def test_a_seed_that_skipped_an_update_counts_in_the_mean(tmp_path):
    runs = {seed: write_trained(tmp_path, f"seed{seed}", train__lr=0.1 * seed) for seed in (1, 2)}
    lines = (runs[2] / "train/metrics.jsonl").read_text().splitlines()
    skipped = lines[1][:-1] + ', "skipped": "nan"}'
    (runs[2] / "train/metrics.jsonl").write_text("\n".join([lines[0], skipped, lines[2], ""]))
    mean = SweepVariant("v", (), runs, {}, 2).mean_series("loss", itemgetter("tokens"))
    assert list(mean.x) == [1000, 2000, 3000] and mean.y == pytest.approx([4.85, 4.7, 4.55])
    assert mean.errors == pytest.approx([(0.1 * step) / 2**0.5 for step in (1, 2, 3)])
