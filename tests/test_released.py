"""Runs of every released version of the formats are read, checked, traced and continued (tests/released/make.py)."""

import shutil
from pathlib import Path

import pytest

from drover.pipeline.contract.run import run_in
from drover.pipeline.contract.stages import STAGES
from drover.pipeline.core.files import read_json
from drover.pipeline.records.metrics import read_metrics
from drover.tools.audit import main as audit
from drover.tools.chat import main as chat
from drover.tools.export_tokens import main as export_tokens
from drover.tools.trace.__main__ import main as trace
from drover.tools.verify import main as verify
from drover.tools.weights import main as weights
from tests.conftest import run_stage
from tests.refusal import printed
from tests.released.make import STEPS
from tests.stages.here import run_here
from tests.stand_ins import never

RELEASED = sorted((Path(__file__).parent / "released").glob("*.tar.xz"))


@pytest.fixture(params=RELEASED, ids=lambda path: path.name)
def run(request, tmp_path):
    """The run, unpacked into a folder that it was not made in; its text is not there any more."""
    shutil.unpack_archive(request.param, tmp_path)
    return tmp_path / "tiny"


def test_it_is_in_order_and_up_to_date(run, capsys):
    assert "nothing is wrong" in printed(capsys, verify, "--run", run)
    assert "proven" in printed(capsys, audit, "--run", run)
    for stage in STAGES:
        assert run_here(stage, run / "config.yaml", body=never) == 0
        assert "up to date" in capsys.readouterr().out


def test_its_documents_and_weights_are_read(run, capsys, tmp_path):
    output = printed(capsys, trace, "--run", run, "--step", "1", "--text")
    assert "document " in output and "sample 3" in output
    printed(capsys, export_tokens, "--run", run, "--out", tmp_path / "tokens")
    for number, source in enumerate((run, run / "convert/hf")):
        assert printed(capsys, chat, source, "Ba", "--max-tokens", "4")
        printed(capsys, weights, source, "--to", tmp_path / f"weights-{number}", "--format", "hf")


@pytest.mark.slow
def test_it_goes_on_from_its_checkpoint_through_all_stages_that_follow(run):
    config = run / "config.yaml"
    more = f"train.steps={STEPS + 2}"
    stored = f"train.tokens_from=file://{run.parent}/store"  # the copy of its token shards
    assert f"step {STEPS}" in run_stage("train", config, more, stored, "--accept-changes").stdout
    assert [record["step"] for record in read_metrics(run / "train/metrics.jsonl")] == list(range(1, STEPS + 3))
    for stage in ("convert", "evaluate", "report"):
        run_stage(stage, config, more, "--force")
    assert run_in(run).finished("train").counts["steps"] == STEPS + 2
    assert read_json(run / "evaluate/results.json")["format"] == 1
