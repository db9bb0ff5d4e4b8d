"""The stage report on a made-up run; tests/test_faults.py has it on a real one."""

from drover.pipeline.config.loading import save_config
from drover.pipeline.contract.manifest import read_manifest
from drover.pipeline.core.files import write_json
from tests.reporting.made_up import write_run
from tests.stages.here import run_here


def test_both_forms_are_written_committed_and_copied_and_half_a_line_is_left_out(tmp_path, capsys):
    """A damaged line is none, and its file is named."""
    (run, settings), config = write_run(tmp_path), tmp_path / "run.yaml"
    save_config(settings, config)
    with open(run.own_folder("train") / "metrics.jsonl", "a") as file:
        file.write('{"step": 601, "lo')
    assert run_here("report", config, "report.title=Nights & <Weekends>") == 0
    manifest = read_manifest(run.own_folder("report"))
    assert [record["path"] for record in manifest.outputs] == ["report.html", "report.md"]
    for record in manifest.outputs:
        inner = run.own_folder("report") / record["path"]
        assert inner.read_bytes() == (run.folder / record["path"]).read_bytes()
    assert "<h1>Nights &amp; &lt;Weekends&gt;</h1>" in (run.folder / "report.html").read_text()
    output = capsys.readouterr().out
    assert "8% less than gzip -9 after training text, 12% more than xz -9 after training text." in output
    assert output.endswith(f"open {(run.folder / 'report.html').absolute()}\n")
    with open(run.own_folder("train") / "samples.jsonl", "a") as file:
        file.write("{broken}\n")
    assert run_here("report", config, "--force") == 2
    assert "is damaged" in capsys.readouterr().err
    (run.own_folder("train") / "samples.jsonl").unlink()
    write_json(run.own_folder("evaluate") / "results.json", {"validation": 3, "tasks": []})
    assert run_here("report", config, "--force") == 2
    error = capsys.readouterr().err
    assert "recorded something else than this version" in error and error.count("\n") == 1
