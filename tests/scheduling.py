"""How tests are dealt out to workers: by file, but for files whose tests have little in common, and for the cluster's.

With one class of our own because `--dist loadgroup` of pytest-xdist 3.8 groups nothing under pytest 9.2, in silence.
"""

from __future__ import annotations

import re
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling

CLUSTERS = {"test_chain.py": "a", "test_queueing.py": "a", "test_fake_slurm.py": "a", "test_one_job.py": "b"}
"""Files of tests/slurm that share the lab of one worker; all others share that of a third. They mostly wait."""
SPREAD = "tests/stages/"
"""Its files' tests are long. Where no fixture belongs to the file, any worker may take any of them."""
FIXTURE = re.compile(r"""scope=["'](module|class)["']""")


class ByWhatIsShared(LoadScopeScheduling):
    """Gives a worker at once all tests that share something costly."""

    def _split_scope(self, nodeid: str) -> str:
        return unit(nodeid, self.config.rootpath)


def unit(nodeid: str, root: Path) -> str:
    """The name of what a test is dealt out with."""
    file = nodeid.partition("::")[0]
    if file.startswith("tests/slurm/"):
        return f"tests/slurm {CLUSTERS.get(Path(file).name, 'c')}"
    alone = file.startswith(SPREAD) and not FIXTURE.search((root / file).read_text(encoding="utf-8"))
    return nodeid if alone else file
