"""Runs of the train stage as tests need them: started, killed at a step, and read afterwards."""

import json
import os
import shutil
import signal
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
import yaml

from drover.pipeline.contract.manifest import read_manifest
from drover.pipeline.core.files import read_lines
from drover.pipeline.formats.sharded_tensors import CheckpointReader
from drover.pipeline.records.metrics import read_metrics
from drover.tools.audit import audit
from tests.conftest import merged, run_stage, start_stage
from tests.faulty import HOOKS
from tests.waiting import HANG_S, wait_for

THREE_PHASES = [{"until": "4k", "sequence_length": 32, "mixture": {"code": 3, "more": 1}},
                {"until": 12288, "batch_tokens": 2048},
                {"until": "20k", "sequence_length": 128, "batch_tokens": 2048, "mixture": {"code": 1, "more": 1},
                 "lr_end": 0}]
"""A batch ramp with longer sequences, then longer ones still, annealed on other shares: 4 steps each."""
CURVE = ("loss", "grad_norm", "lr", "samples", "targets", "validation_sample_bpb")


def reusing(prepared, folder, **changes):
    """Config, in a folder, of a new run that takes the token shards of the run `mini` of a prepared config."""
    return changed(prepared, folder, {"reuse": str(prepared.parent / "runs/mini"), **changes})


def changed(config, folder, changes):
    """Config, in a folder, of runs there with other settings."""
    path = folder / "mini.yaml"
    path.write_text(yaml.safe_dump(merged(yaml.safe_load(config.read_text()),
                                          {"runs_dir": str(folder / "runs"), **changes})))
    return path


def copy_run(config, folder, **changes):
    """Config, in a folder, of a copy of all runs beside another config."""
    shutil.copytree(config.parent / "runs", folder / "runs")
    return changed(config, folder, changes)


def with_phases(config, phases):
    """The config itself, with other phases from now on."""
    return changed(config, config.parent, {"train": {"phases": phases}})


def train_folder(config, name="mini"):
    return config.parent / f"runs/{name}/train"


def manifest_of(config, stage="train", name="mini"):
    """The manifest of a stage; None before it is done."""
    return read_manifest(config.parent / "runs" / name / stage)


def lines(config, name="mini", log="metrics"):
    """The log as it stands, repeated steps included."""
    return list(read_lines(train_folder(config, name) / f"{log}.jsonl"))


def events(config, kind, name="mini"):
    """Everything of one kind that training logged."""
    return [event for event in lines(config, name, "events") if event["event"] == kind]


def curve(config, name="mini"):
    """What training computed, step by step, without what the clock measured."""
    metrics = read_metrics(train_folder(config, name) / "metrics.jsonl")
    return [{key: record[key] for key in ("step", *CURVE) if key in record} for record in metrics]


def difference(found, expected):
    """The largest relative difference of any record's loss or gradient norm from that of its step."""
    return max(abs(record[key] / expected[record["step"]][key] - 1)
               for record in found for key in ("loss", "grad_norm"))


def assert_equal_but_for_rounding(config, within):
    """All lines of the log, also those of repeated steps, are those of the run `whole`, but for sums in another
    order."""
    whole = {record["step"]: record for record in curve(config, "whole")}
    assert {record["step"] for record in lines(config)} == set(whole)
    assert all(record[key] == whole[record["step"]][key] for record in lines(config)
               for key in ("samples", "targets", "lr"))
    assert difference(lines(config), whole) <= within


def texts(config, name="mini"):
    """Sample texts by step and prompt."""
    return {(record["step"], record["prompt"]): record["text"] for record in lines(config, name, "samples")}


def stored_tensors(config, name="mini", step="????????"):
    """Weights, moments and generators of the last checkpoint, or of that of a step."""
    newest = max((train_folder(config, name) / "checkpoints").glob(f"step-{step}"))
    with CheckpointReader(newest) as reader:
        return {tensor: reader.read(tensor) for tensor in reader.names()}


def weights(config, name="mini"):
    """Files of the last checkpoint of a finished run and their hashes."""
    return sorted((record["path"], record["sha256"]) for record in manifest_of(config, name=name).outputs
                  if record["path"].endswith(".safetensors"))


def assert_equal_to_the_bit(config, name="mini", to="whole"):
    """Curves, texts and all tensors of the last checkpoint of two runs."""
    assert curve(config, name) == curve(config, to) and texts(config, name) == texts(config, to)
    result, expected = stored_tensors(config, name), stored_tensors(config, to)
    assert result.keys() == expected.keys() and any(tensor.startswith("exp_avg_sq.") for tensor in result)
    assert all(torch.equal(result[tensor], expected[tensor]) for tensor in expected)


def proven(config, name="mini"):
    """Whether the run's own records prove that every sample was used exactly once; fails with what they say."""
    result = audit(config.parent / "runs" / name)
    assert not result.faults, "\n".join(result.lines())
    return True


def descendants(pid):
    """Every process below `pid`: the elastic agent's workers are in sessions of their own."""
    children = []
    with suppress(OSError):  # threads and processes end while they are looked at
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                children += [int(child) for child in (thread / "children").read_text().split()]
    return children + [deeper for child in children for deeper in descendants(child)]


def rank_process(pid, rank):
    """The process of a rank among those below `pid`, by the name that tests/warm.py gives it."""
    return next(below for below in descendants(pid) if Path(f"/proc/{below}/comm").read_text().strip() == f"rank{rank}")


@contextmanager
def started(config, *overrides, how=signal.SIGKILL, **options):
    """Training in the background, which is ended by this signal with the block. options: see start_stage."""
    process = start_stage("train", config, *overrides, **options)
    try:
        yield process
    finally:
        kill(process, how)


def kill(process, how=signal.SIGKILL):
    """Signal a process and everything below it, and wait until all have ended: one that is still being taken down
    holds its lock of the run, and the next start is refused."""
    everyone = [process.pid, *descendants(process.pid)] if process.poll() is None else []
    for pid in everyone:
        with suppress(ProcessLookupError):
            os.kill(pid, how)
    process.wait(HANG_S)
    wait_for(lambda: not any(map(is_running, everyone)))


def is_running(pid):
    """Whether a process is there and not only waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def train_and_kill(config, *overrides, ranks, after_step, how=signal.SIGKILL, log="metrics"):
    """Start training, and signal it and its workers once it has itself logged `after_step` or a later one.

    log: `events` waits for a checkpoint of such a step instead.
    """
    path = train_folder(config) / f"{log}.jsonl"
    earlier = len(_lines_so_far(path))
    with started(config, *overrides, ranks=ranks, how=how) as process:
        wait_for(lambda: any(record["step"] >= after_step for record in map(json.loads, _lines_so_far(path)[earlier:])
                             if record.get("event", "checkpoint") == "checkpoint"), of=process)


def _lines_so_far(path):
    """The whole lines of a file that is written to, in one read: a start may just be cutting off half a line."""
    return path.read_bytes().split(b"\n")[:-1] if path.exists() else []


def run_train(config, *overrides, **options):
    """A run of the stage to its end."""
    return run_stage("train", config, *overrides, **options)


def run_with_faults(config, faults, *overrides, **options):
    """A run of the stage to its end, with faults on purpose (tests/faulty.py)."""
    return run_train(config, *overrides, f"train.hooks={HOOKS}", DROVER_FAULTS=faults, **options)
