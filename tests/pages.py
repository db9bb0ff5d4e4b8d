"""Pages of the documentation: their commands, and a folder in which these run as in the checkout."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.conftest import REPOSITORY, environment, warm_server
from tests.waiting import HANG_S

BLOCK = re.compile(r"(?:<!-- (?:needs|takes) ([^>\n]*) -->\n)?```bash\n(.*?)```", re.DOTALL)
WARM = "drover.pipeline.train|drover.pipeline.convert|drover.pipeline.evaluate"


def commands(*pages, needs=None):
    """The commands of pages of docs/, in their order, without comments; lines of a quoted program stay together.

    needs: only those of blocks that need nothing, or one of these.
    """
    return [re.split(r"\s+# ", command)[0].strip() for page in pages
            for needed, block in BLOCK.findall((REPOSITORY / f"docs/{page}.md").read_text())
            if needs is None or not needed or needed in needs
            for command in re.findall(r'(?:[^"\n]|"[^"]*")+', block)]


def files(*pages):
    """The text of each file that pages of docs/ show, by the name in its first line."""
    return {name: text for page in pages for name, text in re.findall(
        r"```(?:python|yaml)\n# (\S+)\n(.*?)```", (REPOSITORY / f"docs/{page}.md").read_text(), re.DOTALL)}


def run_program(page):
    """Run the Python program of a page of docs/ in this process."""
    [program] = re.findall(r"```python\n(.*?)```", (REPOSITORY / f"docs/{page}.md").read_text(), re.DOTALL)
    exec(compile(program, page, "exec"), {})  # noqa: S102 - the page is ours


def checkout(home):
    """Make a folder look like the checkout, but for its configurations; the folder."""
    for name in ("launch", "pipeline", "model", "tools", "benchmarks"):
        (home / name).symlink_to(REPOSITORY / name)
    (home / "configs").mkdir()
    # The command, also where the environment was installed before there was one.
    _program(home / ".bin/drover", f'exec {sys.executable} -m drover "$@"')
    return home


def warm_stages(home):
    """Let the command of such a folder start the stages that need torch as forks of a process that has imported it
    (tests/warm.py); the folder."""
    python = home / ".warm/python"  # not on PATH: only what the launcher starts is started with it
    _program(python, f'case "$2" in {WARM}) exec {sys.executable} -m tests.warm {warm_server().address} "$@";;\n'
                     f'drover) shift 2; exec {home}/.bin/drover "$@";; esac\nexec {sys.executable} "$@"')
    _program(home / ".bin/drover", f'exec {sys.executable} -c "import sys; sys.executable = \'{python}\'; '
                                   f'from drover.__main__ import main; sys.exit(main())" "$@"')
    return home


def _program(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def typed(command, home):
    """The result of a shell command in such a folder."""
    return subprocess.run(command, shell=True, cwd=home, capture_output=True, text=True, timeout=HANG_S, check=False,
                          env=with_programs(home))


def with_programs(home):
    """The environment of a command in such a folder, with this Python's programs on PATH."""
    path = f"{home}/.bin{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**environment(), "PATH": path}
