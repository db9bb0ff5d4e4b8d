"""Elements that share the data stages and are killed at random moments make the bytes of one process.

    python -m tests.stages.test_random_kills FOLDER 100

kills so many processes and prints what came of it.
"""

import random
import signal
import sys
import time
from pathlib import Path

import pytest
import yaml

from drover.pipeline.contract.manifest import read_manifest
from tests.conftest import environment, warm_server
from tests.dirty_corpus import every_pass, write_dirty
from tests.waiting import HANG_S

STAGES = ("shard", "tokenizer", "encode")
ELEMENTS = ("a", "b", "c")


def start(folder, stage, *arguments):
    return warm_server().start([f"drover.pipeline.{stage}", "--config", str(folder / "config.yaml"), *arguments],
                               environment())


def outputs(folder, name):
    return {(stage, record["path"], record["sha256"]) for stage in STAGES
            for record in read_manifest(folder / "runs" / name / stage).outputs}


def with_kills(folder, kills, seed):
    """Kill so many processes, run after run, until all are spent. The number of runs, and of kills by stage."""
    write_dirty(folder)
    (folder / "config.yaml").write_text(yaml.safe_dump({
        "name": "one", "runs_dir": str(folder / "runs"), "shard": every_pass(folder),
        "tokenizer": {"vocab_size": 1024}, "launch": {"processes": 1}}))
    chance, spent, runs = random.Random(seed), dict.fromkeys(STAGES, 0), 0
    for stage in STAGES:
        assert start(folder, stage).wait(HANG_S) == 0
    while sum(spent.values()) < kills:
        runs += 1
        for stage in STAGES:
            elements = {element: start(folder, stage, "--element", element, f"name=run{runs}") for element in ELEMENTS}
            while elements:
                time.sleep(chance.random())
                element = chance.choice([*elements])
                if elements[element].poll() is None and sum(spent.values()) < kills:
                    elements[element].kill()
                    spent[stage] += 1
                for each, process in [*elements.items()]:
                    if (status := process.poll()) == -signal.SIGKILL:
                        elements[each] = start(folder, stage, "--element", each, f"name=run{runs}")
                    elif status is not None:
                        said = "".join(elements.pop(each).communicate(HANG_S))
                        assert status == 0, said
        assert outputs(folder, f"run{runs}") == outputs(folder, "one")
        assert not [*(folder / "runs" / f"run{runs}").rglob("*.tmp"), *(folder / "runs").rglob("claims")]
    return runs, spent


@pytest.mark.slow
def test_elements_killed_at_random_make_the_bytes_of_one_process(tmp_path):
    with_kills(tmp_path, 8, seed=7)


if __name__ == "__main__":
    print(with_kills(Path(sys.argv[1]), int(sys.argv[2]), seed=0))
