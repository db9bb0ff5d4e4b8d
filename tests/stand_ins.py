"""Tiny stages for tests of the stage contract, so that the contract itself is tested."""

from pathlib import Path

from drover.pipeline.config.loading import load_config
from drover.pipeline.contract.entry import stage_main
from drover.pipeline.contract.run import Run
from drover.pipeline.contract.state import StageJob, read_state
from drover.pipeline.core.files import output_record, write_text


def copy_corpus(work):
    """A stand-in for the shard stage: one output made of the input file."""
    path = work.folder / "text.txt"
    write_text(path, Path(work.listing()[0]["path"]).read_text().upper())
    work.commit([output_record(work.folder, path, docs=1)], {"docs": 1})


def count_bytes(work):
    """A stand-in for the tokenizer stage: reads the stage before it."""
    folder, manifest = work.input("shard")
    text = (folder / manifest.outputs[0]["path"]).read_text()
    write_text(work.folder / "size.txt", str(len(text)))
    work.commit([output_record(work.folder, work.folder / "size.txt")], {"vocab_size": len(text)})


def count_bytes_again(work):
    """A stand-in for the encode stage: needs both stages before it."""
    work.input("tokenizer")
    count_bytes(work)


def never(work):
    raise AssertionError("this stage should not have run")


def call(place, stage, body, *arguments):
    return stage_main(stage, body, ["--config", str(place / "c.yaml"), *arguments])


def in_chain(chain):
    """The arguments with which a launcher's submission starts a stage."""
    return "--job", str(StageJob(chain))


def run_of(place, *overrides):
    """The run of a place, as its configuration is now."""
    return Run(load_config(place / "c.yaml", overrides))


def state(place, stage="shard"):
    result = read_state(place / "runs/a" / stage)
    return result and (result.status, result.step)
