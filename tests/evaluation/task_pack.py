"""The forms of tasks that configs/tasks/README.md shows, as they stand there."""

import re

from drover.pipeline.contract.stages import REPOSITORY

FILES = {name: text for name, _, text in re.findall(
    r"^`([\w.]+)`\n\n```(yaml|json)\n(.*?)```", (REPOSITORY / "configs/tasks/README.md").read_text(encoding="utf-8"),
    re.DOTALL | re.MULTILINE)}


def write_pack(folder):
    """The README's files in a new folder; the folder."""
    folder.mkdir()
    for name, text in FILES.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder
