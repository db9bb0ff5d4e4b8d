"""The stage report on a made-up run; tests/test_faults.py has it on a real one."""

import pytest

from drover.pipeline.config.loading import save_config
from drover.pipeline.contract.entry import stage_main
from drover.pipeline.contract.manifest import read_manifest
from drover.pipeline.core.files import write_json
from drover.pipeline.report import report
from tests.reporting.made_up import results, write_run


@pytest.fixture
def made(tmp_path):
    """(run, arguments of the stage)"""
    run, settings = write_run(tmp_path)
    save_config(settings, tmp_path / "run.yaml")
    return run, ["--config", str(tmp_path / "run.yaml")]


def test_both_forms_are_written_committed_and_copied_and_half_a_line_is_left_out(made, capsys):
    run, arguments = made
    with open(run.own_folder("train") / "metrics.jsonl", "a") as file:
        file.write('{"step": 601, "lo')
    assert stage_main("report", report, [*arguments, "report.title=Nights & <Weekends>"]) == 0
    manifest = read_manifest(run.own_folder("report"))
    assert [record["path"] for record in manifest.outputs] == ["report.html", "report.md"]
    for record in manifest.outputs:
        inner = run.own_folder("report") / record["path"]
        assert inner.read_bytes() == (run.folder / record["path"]).read_bytes()
    assert "<h1>Nights &amp; &lt;Weekends&gt;</h1>" in (run.folder / "report.html").read_text()
    said = capsys.readouterr().out
    assert "9% less than gzip -9" in said
    assert said.endswith(f"open {(run.folder / 'report.html').absolute()}\n")


def test_new_results_are_shown_and_a_damaged_log_is_named(made, capsys):
    run, arguments = made
    changed = results()
    changed["heldout"]["overall"]["bits_per_byte"] = 1.2345
    write_json(run.own_folder("evaluate") / "results.json", changed)
    assert stage_main("report", report, arguments) == 0
    assert "1.2345" in (run.folder / "report.html").read_text()
    with open(run.own_folder("train") / "samples.jsonl", "a") as file:
        file.write("{broken}\n")
    assert stage_main("report", report, [*arguments, "--force"]) == 2
    assert "is damaged" in capsys.readouterr().err
