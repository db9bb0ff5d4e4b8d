"""Elements that share the data stages and are killed at random moments make the bytes of one process."""

import random
import signal
import time

import pytest
import yaml

from drover.pipeline.contract.manifest import read_manifest
from tests.conftest import environment, warm_server
from tests.dirty_corpus import every_pass, write_dirty
from tests.waiting import HANG_S

STAGES = ("shard", "tokenizer", "encode")
ELEMENTS = ("a", "b", "c")
KILLS = 2
"""In each stage."""


def start(folder, stage, *arguments):
    return warm_server().start([f"drover.pipeline.{stage}", "--config", str(folder / "config.yaml"), *arguments],
                               environment())


def outputs(folder, name):
    return {(stage, record["path"], record["sha256"]) for stage in STAGES
            for record in read_manifest(folder / "runs" / name / stage).outputs}


@pytest.mark.slow
def test_elements_killed_at_random_make_the_bytes_of_one_process(tmp_path):
    folder = tmp_path
    write_dirty(folder)
    (folder / "config.yaml").write_text(yaml.safe_dump({
        "name": "one", "runs_dir": str(folder / "runs"), "shard": every_pass(folder),
        "tokenizer": {"vocab_size": 1024}, "launch": {"processes": 1}}))
    chance, took = random.Random(7), {}
    for stage in STAGES:
        began = time.monotonic()
        assert start(folder, stage).wait(HANG_S) == 0
        took[stage] = time.monotonic() - began
    for run in ("first", "second"):
        for stage in STAGES:
            elements, left = {each: start(folder, stage, "--element", each, f"name={run}") for each in ELEMENTS}, KILLS
            while elements:
                time.sleep(chance.random() * took[stage] / 4 if left else 0.1)
                for each, process in [*elements.items()]:
                    if (status := process.poll()) is not None:
                        output = "".join(elements.pop(each).communicate(HANG_S))
                        assert status == 0, output
                if elements and left:
                    each, left = chance.choice([*elements]), left - 1
                    elements[each].kill()
                    assert elements[each].wait(HANG_S) in (0, -signal.SIGKILL)
                    elements[each] = start(folder, stage, "--element", each, f"name={run}")
        assert outputs(folder, run) == outputs(folder, "one")
        assert not [*(folder / "runs" / run).rglob("*.tmp"), *(folder / "runs").rglob("claims")]
