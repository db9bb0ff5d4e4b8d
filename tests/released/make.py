"""Make the small run of the present formats that tests/test_released.py opens, from text to report.

    python -m tests.released.make format-2          # writes tests/released/format-2.tar.xz

The name is new for each version of a format that was released: what was released stays, and stays readable.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml

from tests.conftest import environment

FOLDER = Path(__file__).resolve().parent
STEPS = 4
SETTINGS = {
    "name": "tiny",
    "runs_dir": "runs",
    "shard": {"shard_mb": 0.01, "validation_share": 0.2, "sources": [
        {"kind": "files", "name": "text", "paths": ["text.txt"], "separator": "\n\n"}]},
    "tokenizer": {"vocab_size": 640},
    "model": {"dim": 8, "layers": 1, "heads": 2, "kv_heads": 1, "ffn_dim": 16, "context_length": 32,
              "tied_embeddings": True},
    "train": {"steps": STEPS, "sequence_length": 32, "batch_tokens": 128, "micro_batch": 4, "lr": 0.01,
              "warmup_steps": 1, "validation_every": 2, "validation_tokens": 500, "sample_every": 4, "sample_tokens": 4,
              "prompts": ["Ba"], "log_to": [], "checkpoint": {"every_steps": 2, "keep": 1}},
    "evaluate": {"validation_tokens": 500, "tasks": [], "prompts": ["Ba"], "prompt_tokens": 4},
    "launch": {"processes": 1},
}
"""As small as a run can be: its embeddings are most of the file."""


def text() -> str:
    """A hundred documents of invented words: enough for the smallest vocabulary."""
    chance = random.Random(0)
    syllables = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
    words = ["".join(chance.choices(syllables, k=chance.randint(1, 3))) for _ in range(120)]
    return "\n\n".join(f"{' '.join(chance.choices(words, k=14)).capitalize()}." for _ in range(100))


def make(to: Path, folder: Path) -> None:
    """Run the whole chain in `folder`, copy its token shards to a store, and pack both. The source text is left out, as
    it is where raw text goes."""
    (folder / "text.txt").write_text(text())
    (folder / "tiny.yaml").write_text(yaml.safe_dump(SETTINGS))
    for command in (["drover", "run", "--config", "tiny.yaml", "--cluster", "local"],
                    ["drover.tools.copy_tokens", "tiny", "--to", f"file://{folder}/store"]):
        subprocess.run([sys.executable, "-m", *command], cwd=folder, env=environment(), check=True)
    with tarfile.open(to, "w:xz") as archive:
        archive.add(folder / "store", "store")
        archive.add(folder / "runs/tiny", "tiny", filter=lambda about: None if ".locks" in about.name else about)


if __name__ == "__main__":
    with TemporaryDirectory() as scratch:
        make(FOLDER / f"{sys.argv[1]}.tar.xz", Path(scratch))
