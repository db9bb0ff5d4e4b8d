"""What is trained on: the token shards of a run in the order that its settings give them."""

from __future__ import annotations

from pipeline.contract.stage_work import Work
from pipeline.data.loader import TrainingData
from pipeline.data.token_shards import open_shards


def open_training_data(work: Work) -> TrainingData:
    """The training split of the encode stage, in the order of the configuration's sources."""
    folder, manifest = work.input("encode")
    records = [record for record in manifest.outputs if record.get("split") == "train"]
    sources = [source.name for source in work.config.shard.sources]
    shards = {source: open_shards(folder, records, "train", source) for source in sources}
    train = work.config.train
    return TrainingData(shards, train.sequence_length, work.config.seed, train.mixture,
                        content=[[record["path"], record["sha256"]] for record in records])
