"""Docs are code, on a cluster too: what docs/slurm.md says to type is typed, in order, on a miniature of the demo."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, environment, write_config
from tests.slurm.clusters import Cluster

BLOCK = re.compile(r"<!-- needs a cluster -->\n```bash\n(.*?)```", re.DOTALL)
COMMANDS = [line.split("  #")[0].strip() for block in BLOCK.findall((REPOSITORY / "docs/slurm.md").read_text())
            for line in block.splitlines()]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """A folder that looks like the checkout, with a miniature of the demo."""
    folder = tmp_path_factory.mktemp("home")
    for name in ("launch", "pipeline", "model", "tools"):
        (folder / name).symlink_to(REPOSITORY / name)
    (folder / "configs").mkdir()
    path = write_config(folder, corpus, name="demo", runs_dir="runs", launch={"processes": 1})
    path.rename(folder / "configs/demo.yaml")
    return folder


def test_the_page_shows_a_whole_day() -> None:
    text = "\n".join(COMMANDS)
    for part in ("tools.slurm_lab up", "--stage all --nodes 4", "--nodes 2", "status.py", "--logs", "--stop",
                 "--cancel", "tools.slurm_lab down"):
        assert part in text


def test_every_command_does_what_the_page_says(home: Path, cluster: Cluster) -> None:
    variables = {**environment(), **cluster.environment()}
    variables["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{variables['PATH']}"
    said = {}
    for command in COMMANDS:
        if "tools.slurm_lab" in command:
            continue  # tests/tools/test_slurm_lab.py starts and stops labs; this one is there for all tests
        result = subprocess.run(command, shell=True, cwd=home, env=variables, capture_output=True, text=True,
                                timeout=400, check=False)
        story = "\n".join(f"==> {path}\n{path.read_text()}" for path in sorted(home.glob("runs/demo/logs/*/*.log")))
        assert result.returncode == 0, f"{command}\n{result.stdout}{result.stderr}\n{story}"
        assert "Traceback" not in result.stderr
        said[command] = result.stdout + result.stderr
    assert (home / "runs/demo/report.html").is_file()
    assert "step 12/12" in next(text for command, text in said.items() if command.endswith("--logs runs/demo train"))
    assert "nothing to submit" in said[COMMANDS[-1]]
