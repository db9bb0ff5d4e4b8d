"""The stages: how long they ran, on which machines, and from which inputs, code and settings."""

from __future__ import annotations

from collections.abc import Iterator

from drover.pipeline.config.loading import dump_config
from drover.pipeline.core.files import Record
from drover.pipeline.reporting.document import NONE, Block, Table, Text, filled
from drover.pipeline.reporting.facts import Facts, shareable


def provenance(facts: Facts) -> Iterator[Block]:
    """The chapter."""
    rows = list[Record]()
    for name, manifest in facts.manifests.items():
        commit = str(manifest.git.get("commit") or NONE)[:10] + " + changes" * bool(manifest.git.get("changed"))
        rows.append({**vars(manifest), "run_s": facts.run_s(name), "time": manifest.finished.replace("T", " ")[:19],
                     "size": sum(record["bytes"] for record in manifest.outputs), "commit": commit,
                     "reused": facts.reused.get(name)})
    yield Table("Stages", {
        "stage": "{stage}", "run time": "{run_s:s}", "ranks": "{execution[world_size]:n}",
        "processes": "{execution[processes]:n}", "cores": "{execution[cores]:n}", "host": "{execution[host]}",
        "accelerator": "{counts[device_name]}", "finished (UTC)": "{time}", "output": "{size:B}", "commit": "{commit}",
        "reused from the run": "{reused}"}, rows,
        "Run time: of the start that finished the stage; of all starts of training. Each stage's manifest.json has the "
        "hashes of its inputs and outputs.")
    yield filled("The newest checkpoint is train/{checkpoint}, the Hugging Face model convert/hf. "
                 "train/metrics.jsonl has every step, evaluate/results.json the evaluation and what its numbers mean.",
                 facts.counts("train"))
    yield Text("Configuration, with all defaults and without folders", shareable(dump_config(facts.config)),
               folded=True)
