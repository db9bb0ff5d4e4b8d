"""The train stage in fp8: as near to bf16 as it is said to be, looked at layer by layer, begun and left at a save."""

import pytest

from drover.pipeline.contract.manifest import read_manifest
from drover.pipeline.training.monitor import fp8_curves
from drover.tools.parity import report
from tests.stages.training import curve, events, lines, proven, run_train, run_with_faults, train_folder

pytestmark = pytest.mark.slow
pytest.importorskip("torchao", reason="torchao is not installed, which fp8 needs: pip install --editable '.[fp8]'")

BAND = 0.01
"""By how much of bf16's loss fp8's may be higher, over each tenth of sixty steps after the first two."""
QUIET = ["train.heldout_every=60", "train.sample_every=100", "train.checkpoint.every_steps=100"]


@pytest.fixture(scope="module")
def in_bf16(tmp_path_factory, encoded):
    """What fp8 is held against."""
    return sixty_steps(encoded, tmp_path_factory.mktemp("bf16"), "train.precision=bf16")


def sixty_steps(encoded, folder, *settings):
    run_train(encoded, "name=parity", f"runs_dir={folder}/runs", f"reuse={encoded.parent / 'runs/mini'}",
              "train.steps=60", *QUIET, *settings)
    return lines(folder / "c.yaml", "parity")


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp", "tensorwise"])
def test_the_losses_stay_beside_those_of_bf16(encoded, tmp_path, in_bf16, recipe):
    found = sixty_steps(encoded, tmp_path, "train.precision=fp8", f"train.fp8_recipe={recipe}")
    told, sound = report(in_bf16, found, BAND)
    assert sound, "\n".join(told)
    assert all(ours["loss"] != theirs["loss"] for ours, theirs in zip(found[1:], in_bf16[1:], strict=True))
    assert found[-1]["loss"] < 0.6 * found[0]["loss"]


def test_measuring_the_layers_changes_nothing_and_is_logged(fresh):
    """Also those of a pipeline's stages, under their own names."""
    often = ["train.precision=fp8", "train.fp8_watch_every=5", "train.fp8_skip=['*.wk']", "train.micro_batch=4",
             "parallel.pp=2"]
    run_train(fresh, *often, ranks=2)
    run_train(fresh, "name=seldom", *often, "train.fp8_watch_every=100", ranks=2)
    assert curve(fresh) == curve(fresh, "seldom")
    assert [event["step"] for event in events(fresh, "fp8", "seldom")] == [1, 12]
    looked = [record for record in lines(fresh) if "fp8_input_amax" in record]
    assert [record["step"] for record in looked] == [1, 5, 10, 12]
    for event, record in zip(events(fresh, "fp8"), looked, strict=True):
        assert [name[-2:] for name in event["layers"]] == ["wq", "wv", "wo", "w1", "w2", "w3"] * 2
        assert fp8_curves(event["layers"]).items() <= record.items()


def test_a_run_goes_into_fp8_at_a_checkpoint_on_other_ranks(fresh):
    """What each start computed in is said and recorded; `auto` stays in it."""
    steps = ["train.steps=24", "train.checkpoint.every_steps=4", "train.checkpoint.background=false"]
    run_with_faults(fresh, "kill:rank=0,step=6", *steps, "train.precision=bf16", expect=-9)
    into = [*steps, "train.precision=fp8"]
    assert 'train.precision: "bf16" -> "fp8"' in run_train(fresh, *into, expect=2).stderr
    faults = "kill:rank=0,step=6;kill:rank=0,step=10"
    said = run_with_faults(fresh, faults, *into, "--accept-drift", "parallel.tp=2", ranks=2, expect=1).stdout
    assert "fp8 as configured, bf16 before" in said
    again = run_train(fresh, *steps, "train.precision=auto", "--accept-drift").stdout
    assert "fp8, as the run started" in again and "fp8 (rowwise) in 14 linear layers" in again
    assert [event["precision"] for kind in ("start", "resume") for event in events(fresh, kind)] == [
        "bf16", "fp8", "fp8"]
    assert read_manifest(train_folder(fresh)).counts["precision"] == "fp8"
    found = curve(fresh)
    assert len(found) == 24 and found[-1]["loss"] < 0.8 * found[0]["loss"] and proven(fresh)
