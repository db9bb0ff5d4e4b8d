"""Token shards in an object store: what of them cannot be read ends training. tests/stages compares with files."""

import pytest
import yaml

from pipeline.contract.manifest import read_manifest
from pipeline.files import read_lines
from pipeline.records.metrics import read_metrics
from pipeline.stores.store import Store
from tests.conftest import run_stage
from tools.copy_tokens import main as copy_tokens

pytestmark = pytest.mark.slow
TIMES = {"tokens_per_s", "step_s", "data_wait_s", "memory_mb", "time", "train_s", "goodput", "look_s", "mfu",
         "shards_checked"}


def copied(config, bucket):
    """The URL of the run's shards in the bucket."""
    reused = yaml.safe_load(config.read_text())["reuse"]
    assert copy_tokens(["--run", reused, "--to", bucket.url_of("tokens"), "--compare"]) == 0
    return bucket.url_of("tokens")


def metrics(run):
    """What a run measured, but for times, how far the comparing was, and what only reading from a store has."""
    lines = read_metrics(run / "train/metrics.jsonl")
    return [{name: value for name, value in line.items() if name not in TIMES and not name.startswith("store_")}
            for line in lines]


def weights(run):
    """Files of the last checkpoint and their hashes."""
    manifest = read_manifest(run / "train")
    return sorted((record["path"], record["sha256"]) for record in manifest.outputs
                  if record["path"].startswith(manifest.counts["checkpoint"])
                  and record["path"].endswith(".safetensors"))


def ending(run):
    """What the last start's reading took."""
    return [event["store"] for event in read_lines(run / "train/events.jsonl") if "store" in event][-1]


def test_what_cannot_be_read_ends_training_by_name(fresh, seaweed, tmp_path):
    url = copied(fresh, seaweed)

    def refused(place, *told, **more):
        said = run_stage("train", fresh, f"train.tokens_from={place}", f"train.cache.folder={tmp_path / 'cache'}",
                         expect=2, **more).stderr
        assert all(text in said for text in told) and "wrong-secret" not in said
    refused(url, "refused", url, AWS_SECRET_ACCESS_KEY="wrong-secret")
    refused(f"{url}-not", f"{url}-not (train.tokens_from) holds no finished copy")
    store = Store(url)
    path = next(entry.path for entry in store.list() if entry.path.startswith("train/"))
    store.put(path, bytes(len(store.read(path))))
    refused(url, f"{url}/{path} is not what the stage encode committed", ranks=2)
