"""A run that never ran, to make reports of."""

from pathlib import Path

from drover.pipeline.config.data import FilesSource, ShardConfig
from drover.pipeline.config.loading import save_config
from drover.pipeline.config.training import TrainConfig
from drover.pipeline.config.tree import Config
from drover.pipeline.contract.inputs import hashed_now
from drover.pipeline.contract.manifest import Manifest
from drover.pipeline.contract.run import Run, code_hashes
from drover.pipeline.contract.stages import STAGES
from drover.pipeline.core.files import read_json, write_json
from drover.pipeline.evaluation.results import DEFINITIONS
from tests.data.source_files import write_jsonl

EVIL = "</pre><script>alert(1)</script><img src=https://example.org/x.png onerror=alert(2)> ``` & | done"
SOURCES = ("stdlib", "prose")


def config(folder):
    text = folder / "input.txt"
    text.write_text("some text\n")
    sources = [FilesSource(kind="files", name=name, paths=[str(text)]) for name in SOURCES]
    return Config(name="made-up", runs_dir=str(folder / "runs"), shard=ShardConfig(sources=sources, keep_dropped=True),
                  train=TrainConfig(mixture=dict.fromkeys(SOURCES, 1.0)))


def recorded():
    """What the stages of the run recorded: `made_by` and `counts` of their manifests, evaluate's `results`, the
    `tokenizer`'s report, `events` of training."""
    result = read_json(Path(__file__).with_suffix(".json"))
    cards = result["counts"]["shard"]["cards"].values()
    for example in (card["examples"]["length"]["fewer than 20 words"][0] for card in cards):
        example["text"] = f"too\nshort {EVIL}"
    result["counts"]["shard"]["incomplete_files"][0]["reason"] = EVIL
    result["results"]["continuations"][0]["text"] = EVIL
    result["results"]["definitions"] = DEFINITIONS
    return result


def metrics():
    result = [{
        "step": step, "loss": 2.9 + 6 / step, "lr": 3e-3 * min(1, step / 50), "grad_norm": 0.6 + 4 / step,
        "tokens": step * 8192, "tokens_per_s": 28000, "data_wait_s": 0.0004,
        "step_s": 0.29, "memory_mb": 912.5, "mfu": None} for step in range(1, 601)]
    for record in result[99::100]:
        record["validation_sample_bpb"] = {"stdlib": 1.85 + 200 / record["step"], "prose": 2.02 + 200 / record["step"]}
        record["validation_sample_loss"] = {"stdlib": 3.2 + 200 / record["step"]}
    return result


def write_run(folder):
    """Manifests of every stage before the report, and the files beside them."""
    folder.mkdir(exist_ok=True)
    settings, made = config(folder), recorded()
    run = Run(settings)
    run.folder.mkdir(parents=True)
    save_config(settings, run.folder / "config.yaml")
    for name in STAGES["report"].needs:
        files = [*run.files(name), *hashed_now(run.listing(name))]
        identity = {key: value for key, value in run.fingerprint(name).items() if key != "listing"}
        manifest = Manifest(
            name, identity | {"files": {file["name"]: file["sha256"] for file in files}}, [], made["counts"][name],
            "0" * 64, files=files, started="2026-03-01T10:00:00+00:00", finished="2026-03-01T10:03:00+00:00",
            **made["made_by"][name])
        manifest.code = {**code_hashes(STAGES[name]), **made["other_code"].get(name, {})}
        manifest.write(run.own_folder(name))
    train = run.stage_folder("train")
    # Steps 1 to 9 were done twice: the first attempt's values must not be shown.
    write_jsonl(train / "metrics.jsonl", [{**record, "loss": 99.0} for record in metrics()[:9]] + metrics()
                + [{**metrics()[299], **skipped} for skipped in made["skipped"]])
    write_jsonl(train / "samples.jsonl", [{"step": step, "prompt": prompt, "text": f"{prompt}{step} {EVIL}"}
                                          for step in (200, 400, 600, 800) for prompt in ("class ", "import ")])
    spikes = [{"event": "spike", "step": step, "time": "2026-03-01T10:02:30.000+00:00"} for step in range(500, 560)]
    write_jsonl(train / "events.jsonl", made["events"][:-1] + spikes + made["events"][-1:])
    write_json(run.stage_folder("evaluate") / "results.json", made["results"])
    write_json(run.stage_folder("tokenizer") / "report.json", made["tokenizer"])
    return Run(settings), settings
