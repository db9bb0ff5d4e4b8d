"""The train stage in fp8: looked at layer by layer. What it computes, tests/parallel/test_fp8.py shows."""

import pytest

from drover.pipeline.training.monitor import fp8_curves
from tests.stages.training import curve, events, lines, manifest_of, run_train

pytestmark = pytest.mark.slow
pytest.importorskip("torchao", reason="torchao is not installed, which fp8 needs: pip install --editable '.[fp8]'")


def test_measuring_the_layers_changes_nothing_and_is_logged(fresh):
    """Also those of a pipeline's stages, under their own names. `auto` stays in fp8; another precision is recorded."""
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
    longer = [*often, "train.precision=auto", "train.steps=13", "--accept-changes"]
    output = run_train(fresh, *longer, ranks=2).stdout
    assert "fp8, as the run started" in output and "fp8 (rowwise) in 12 linear layers" in output
    run_train(fresh, *often, "train.precision=bf16", "train.steps=14", "--accept-changes", ranks=2)
    starts = [event["precision"] for kind in ("start", "resume") for event in events(fresh, kind)]
    assert starts == ["fp8", "fp8", "bf16"] and manifest_of(fresh).counts["precision"] == "bf16"
