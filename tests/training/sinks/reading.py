"""What TensorBoard, Weights & Biases and MLflow have stored, read back without them as far as that is possible."""

import importlib.util
import json
import os
import struct

import pytest

needs_wandb = pytest.mark.skipif(importlib.util.find_spec("wandb") is None,
                                 reason="the package wandb is not installed: pip install -e '.[wandb]'")
needs_mlflow = pytest.mark.skipif(importlib.util.find_spec("mlflow") is None,
                                  reason="the package mlflow is not installed: pip install -e '.[mlflow]'")
BLOCK = 32768
"""W&B's file is a LevelDB log: records, in pieces, in blocks of so many bytes."""


def board_points(folder, tag):
    """A TensorBoard curve."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    board = EventAccumulator(str(folder))
    board.Reload()
    return [(event.step, event.value) for event in board.Scalars(tag)]


def wandb_rows(run_folder):
    """Every row of the offline files in a run folder, in the order in which they were begun."""
    return [{".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            for record in wandb_records(run_folder) if record.WhichOneof("record_type") == "history"]


def wandb_records(run_folder):
    from wandb.proto.wandb_internal_pb2 import Record
    for path in sorted((run_folder / "wandb").glob("offline-run-*/run-*.wandb")):
        for data in _log_records(path.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            yield record


def _log_records(data):
    at = 7
    complete = b""  # a header of the file comes first
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        complete += data[at + 7:at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last piece
            yield complete
            complete = b""


def mlflow_run(run_folder):
    """A client of the file store in a run folder, and the one run in it."""
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient
    client = MlflowClient(tracking_uri=(run_folder / "mlflow").as_uri())
    [run] = [run for experiment in client.search_experiments()
             for run in client.search_runs([experiment.experiment_id])]
    return client, run
