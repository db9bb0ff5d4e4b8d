"""Pages of the documentation: their commands, and a folder in which these run as in the checkout."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.conftest import REPOSITORY, environment
from tests.waiting import HANG_S

BLOCK = re.compile(r"(?:<!-- (?:needs|takes) (a cluster|torchao|an object store|the network|fastapi|minutes) -->\n)?"
                   r"```bash\n(.*?)```", re.DOTALL)


def commands(*pages: str) -> list[str]:
    """The commands of pages of docs/, in their order, without comments."""
    return [re.split(r"\s+# ", line)[0].strip() for page in pages
            for _, block in BLOCK.findall((REPOSITORY / f"docs/{page}.md").read_text()) for line in block.splitlines()]


def checkout(home: Path) -> Path:
    """Make a folder look like the checkout, but for its configurations; the folder."""
    for name in ("launch", "pipeline", "model", "tools", "benchmarks"):
        (home / name).symlink_to(REPOSITORY / name)
    (home / "configs").mkdir()
    programs = home / ".bin"  # the command, also where the environment was installed before there was one
    programs.mkdir()
    (programs / "drover").write_text(f'#!/bin/sh\nexec {sys.executable} -m drover "$@"\n')
    (programs / "drover").chmod(0o755)
    return home


def typed(command: str, home: Path) -> subprocess.CompletedProcess[str]:
    """The result of a shell command in such a folder, with this Python's programs on PATH."""
    path = f"{home}/.bin{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(command, shell=True, cwd=home, capture_output=True, text=True, timeout=HANG_S, check=False,
                          env={**environment(), "PATH": path})
