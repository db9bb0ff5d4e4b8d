"""The benchmark of the loader runs, on few made-up shards, and opens none before it reads samples."""

import subprocess
import sys

from tests.conftest import REPOSITORY, environment


def test_the_benchmark_reads_made_up_shards():
    command = ["-m", "benchmarks.loader_at_scale", "--shards=30", "--tokens=3e6", "--samples=40", "--length=64"]
    said = subprocess.run([sys.executable, *command, "--document=50"], cwd=REPOSITORY, env=environment(), text=True,
                          capture_output=True, check=True).stdout
    assert said.startswith("30 shards, 2,967,000 tokens, ") and "; 0 shards opened" in said
    assert "40 samples of 64 tokens" in said
