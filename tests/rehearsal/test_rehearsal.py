"""Rehearsals alone: what stands in for many micro-batches, what is found and refused, and the shipped large runs."""

import json
from dataclasses import replace

import pytest

from drover.launch.forecast import state_bytes_per_rank
from drover.model.attention.sdpa import Sdpa
from drover.pipeline.config.loading import load_config
from drover.pipeline.config.tree import changed
from drover.pipeline.core.errors import UserError
from drover.pipeline.rehearsal import fitting
from drover.pipeline.rehearsal.apart import rehearse_apart
from drover.pipeline.rehearsal.fitting import fit_in_memory
from drover.pipeline.rehearsal.report import ends_and_middle, lines
from drover.tools.rehearse import main
from tests.conftest import REPOSITORY
from tests.refusal import refused
from tests.rehearsal.measured import config_of
from tests.rehearsal.published_table import PUBLISHED, row, table


class Waits(Sdpa):
    """The dense mask, and a look at the device in every layer."""

    name = "waits"

    def attend(self, q, k, v, prepared):
        """See Backend."""
        assert not q.sum().isnan().item()
        return super().attend(q, k, v, prepared)


@pytest.mark.slow
def test_three_micro_batches_stand_for_all():
    config = config_of(train={"batch_tokens": 12 * 512}, parallel={"reshard": "never", "reduce": "last"})
    [some], [every] = (rehearse_apart(config, 2, [1], all_micro_batches=every_batch) for every_batch in (False, True))
    assert some.as_json() | {"notes": []} == every.as_json() | {"notes": []}
    assert "of 6 micro-batches" in some.notes[-1] and not any("micro-batches" in note for note in every.notes)


def test_what_makes_a_step_slow_is_named_and_a_plain_step_waits_for_nothing():
    config = config_of(train={"attention": f"{__name__}:Waits"})
    [result], [plain] = rehearse_apart(config, 2, [0]), rehearse_apart(config_of(), 2, [0])
    assert next(iter(result.masks.values()))[-2:] == (512, 512)
    assert any("attention/sdpa.py" in place and "dense_mask" in place for place in result.masks)
    [place] = result.waits
    assert place.startswith("tests/rehearsal/test_rehearsal.py") and place.endswith("(attend)")
    assert place in "\n".join(lines(config, [result])) and not plain.waits and not plain.masks
    assert "none: the host reads nothing but the result of the step" in "\n".join(lines(config_of(), [plain]))


@pytest.mark.parametrize("settings, ranks, rank, text", [
    ({"parallel": {"engine": "deepspeed"}}, 2, 0, "deepspeed', which cannot be rehearsed"),
    ({"model": {"vocab_size": None}, "tokenizer": {"kind": "tiktoken", "path": "there"}}, 2, 0, "Set model.vocab_size"),
    ({}, 3, 0, "not divisible"), ({}, 2, 2, "There is no rank 2 among 2")])
def test_what_cannot_be_rehearsed_is_refused_in_a_paragraph(settings, ranks, rank, text):
    refused(UserError, text, rehearse_apart, config_of(**settings), ranks, [rank])


def test_what_does_not_fit_is_refused_with_what_does(monkeypatch):
    config = config_of(train={"micro_batch": 4})
    [result] = rehearse_apart(config, 2, [0])

    def fit(share):
        return fit_in_memory(config, result, share * result.peak.bytes)
    assert fit(2)[0]
    tight, text = fit(1.05)
    assert tight and "not estimated" in text
    fits, text = fit(0.8)
    assert not fits and "The largest part is activations" in text and "train.micro_batch=2 (89.2 MB)" in text

    def half(config, *arguments, **options):
        return [replace(result, peak=replace(result.peak, bytes=50_000_000))]

    monkeypatch.setattr(fitting, "rehearse_apart", half)
    assert ("and fitting: train.micro_batch=2 (50 MB), or train.activation_checkpointing=selective (50 MB), or "
            "train.activation_checkpointing=full (50 MB).") in fit(0.8)[1]

    def fails(*arguments, **options):
        raise RuntimeError("no memory here\nmore of it")
    monkeypatch.setattr(fitting, "rehearse_apart", fails)
    fits, text = fit(0.8)
    assert not fits and "but not fitting: train.micro_batch=2 (no memory here), " in text
    monkeypatch.setattr(fitting, "SEARCH_S", -1.0)
    assert fit(0.8)[1].endswith(". Take more ranks.")


@pytest.mark.parametrize("parallel", [{}, {"pp": 2, "tp": 2}], ids=["FSDP2", "pipeline x tensor"])
def test_the_plans_estimate_is_about_what_a_step_holds_beside_activations(parallel):
    """More than weights and moments, less than the peak; in a pipeline it counts gradients spread and whole, which are
    not there at the same time."""
    config = config_of(model={"vocab_size": 512, "layers": 8}, train={"batch_tokens": 32 * 512}, parallel=parallel)
    [result] = rehearse_apart(config, 8, [0])
    held = result.peak.kinds
    estimate = state_bytes_per_rank(config, 8)
    assert held["weights"] + held["optimizer state"] < estimate < result.peak.bytes
    beside = result.peak.bytes - held["activations"] - held["logits"]
    assert estimate == pytest.approx(beside, rel=0.4)


@pytest.mark.parametrize("name, ranks, layers, groups", [
    ("llama3_70b", 1024, 8, {"pipeline": 4, "shard": 32, "tensor": 8}),
    pytest.param("llama3_405b", 16384, 32, {"pipeline": 16, "shard": 128, "tensor": 8}, marks=pytest.mark.slow),
])
def test_the_shipped_large_runs_are_rehearsed(name, ranks, layers, groups):
    """With fewer layers, one for each stage, and two micro-batches for each of a pipeline's ranks: the ranks, the
    groups and every layer's shapes are those of the run."""
    config = load_config(REPOSITORY / f"configs/{name}.yaml")
    pp = config.parallel.pp
    config = changed(config, {"model.layers": layers, "train.batch_tokens": ranks // 8 * 8192, "parallel.pp_stages": 2})
    numbers = ends_and_middle(config, ranks)
    assert numbers == [0, ranks // 2, ranks - ranks // pp]
    for one in rehearse_apart(config, ranks, numbers[::2]):
        assert {channel.group: channel.ranks for channel in one.traffic.calls} == {"all ranks": ranks, **groups}
        assert 0 < one.peak.bytes < 40e9 and not one.waits and not one.masks
        assert not any(config.model.vocab_size in item.shape for item in one.peak.items), "of words, a part is held"


@pytest.mark.slow
def test_the_page_has_the_table_that_the_command_makes(capsys):
    """Its heading and first row are made again; the others take minutes."""
    page = (REPOSITORY / "docs/memory.md").read_text()
    path, ranks, _ = PUBLISHED[0]
    for line in table([row(load_config(REPOSITORY / path), ranks)]):
        assert line in page
    assert all(f"| `{load_config(REPOSITORY / path).name}`, {ranks:,} |" in page for path, ranks, _ in PUBLISHED)


def test_the_command_rehearses_for_people_and_for_programs(tmp_path, capsys):
    path = tmp_path / "small.yaml"
    path.write_text(json.dumps({**config_of().model_dump(mode="json"), "tokenizer": {"kind": "byte"}}))
    arguments = [str(path), "--ranks", "4"]
    assert main(["--config", *arguments, "parallel.pp=2", "--memory", "80"]) == 0
    page = capsys.readouterr().out
    for part in ("4 ranks = pp 2 x dp_shard 2", "1f1b, 2 stages; lost by waiting: 25% of the time used",
                 "pipeline: send", "it fits"):
        assert part in page
    assert main(["--config", *arguments, "--rank", "3", "--json"]) == 0
    [result] = json.loads(capsys.readouterr().out)["ranks"]
    assert result["rank"] == 3
    assert {channel["operation"] for channel in result["collectives"]} == {"all-gather", "reduce-scatter", "all-reduce"}
    assert main(["--config", str(path), "--ranks", "3"]) == 2 == main([])
    assert "Give --config" in capsys.readouterr().err
