"""The soak's command line, as a process."""

import subprocess
import sys

from tests.conftest import REPOSITORY, environment


def chaos(*arguments):
    """Run it to its end."""
    variables = {name: value for name, value in environment().items() if not name.startswith(("SLURM", "SBATCH"))}
    return subprocess.run([sys.executable, "-m", "tools.chaos", *arguments], cwd=REPOSITORY, env=variables, text=True,
                          capture_output=True, stdin=subprocess.DEVNULL, check=False)
