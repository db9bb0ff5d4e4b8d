"""Train a model for the filter `classifier` on good and bad documents.

    drover classifier train --good books/ --bad web/ --out quality.bin

Paths are files that a source of `kind: files` reads, or folders of them; fields that hold HTML are read as with `html:
fields`. One document in ten, chosen by the hash of its
text, is not trained on. The model is measured on these: accuracy, and the scores that let 1%, 10% and 30% of the
bad documents pass. The filter needs `label: good`.

The model is fastText's, of words and pairs of words, trained by one thread. The same texts give the same file.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from drover.pipeline.core.console import Parser, Program, draw, say, table
from drover.pipeline.core.errors import UserError, require

GOOD, BAD = "good", "bad"
HELD_OUT = 0.1
"""Share of the documents that the model is measured on."""
FEWEST = 50
"""Documents of each kind that are needed."""
LEAST_EPOCHS, LEAST_SEEN = 5, 50_000
"""Training ends after so many epochs and documents, repeated ones counted again: a model makes small steps."""
PASSING = (0.01, 0.1, 0.3)
"""Shares of the bad documents for which scores are printed."""
SHAPE = {"dim": 32, "wordNgrams": 2, "bucket": 1 << 20, "lr": 0.1, "thread": 1, "seed": 1}
"""fastText's settings: a file of about 130 MB, with 128 bytes more for each word that occurs."""


def add_options(parser: Parser) -> None:
    """The options."""
    parser.add_argument("action", choices=["train"], help="what to do")
    for kind in (GOOD, BAD):
        parser.add_argument(f"--{kind}", nargs="+", required=True, metavar="PATH", help=f"{kind} documents: files, "
                            "folders")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE.bin", help="the model to write")
    parser.add_argument("--text-field", default="text", metavar="FIELD", help="field with the text (default text)")


def work(options: argparse.Namespace) -> None:
    """Train and measure."""
    require("drover classifier", "fasttext")
    if options.out.exists():
        raise UserError(f"{options.out} exists already. Remove it, or give another --out.")
    import fasttext

    from drover.pipeline.data.documents import digest
    from drover.pipeline.data.filters.classifier import LABEL, one_line

    held_out: dict[str, list[str]] = {GOOD: [], BAD: []}
    trained = dict.fromkeys(held_out, 0)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.out.parent) as folder:
        made = Path(folder) / "model"
        lines = made.with_name("lines")
        with open(lines, "w", encoding="utf-8") as file:
            for kind, held in held_out.items():
                for text in documents(kind, getattr(options, kind), options.text_field):
                    if digest(text.encode())[0] < HELD_OUT * 256:
                        held.append(text)
                    else:
                        trained[kind] += 1
                        file.write(f"{LABEL}{kind} {one_line(text).replace(LABEL, ' ')}\n")
        if few := [kind for kind, held in held_out.items() if trained[kind] + len(held) < FEWEST or not held]:
            counts = " and ".join(f"{trained[kind] + len(held):,} {kind}" for kind, held in held_out.items())
            raise UserError(f"There are too few {' and '.join(few)} documents: {counts} were read, {FEWEST} of each "
                            f"are needed. Give more files; --text-field names the field with the text.")
        epochs = max(LEAST_EPOCHS, LEAST_SEEN // sum(trained.values()))
        say("classifier", f"train on {trained[GOOD]:,} good and {trained[BAD]:,} bad documents, {epochs} times")
        fasttext.train_supervised(str(lines), epoch=epochs, verbose=2 * sys.stderr.isatty(), **SHAPE
                                  ).save_model(str(made))
        measure(made, held_out)
        made.replace(options.out)
    say("classifier", f"{options.out}: {{kind: classifier, path: {json.dumps(str(options.out))}, label: {GOOD}}}")


def documents(kind: str, paths: list[str], text_field: str) -> Iterator[str]:
    """The texts of files and folders.

    Raises:
        UserError: a path does not exist, or a file's name shows no format.
    """
    from drover.pipeline.config.data import FilesSource, ShardConfig
    from drover.pipeline.config.tree import Config
    from drover.pipeline.contract.inputs import listed_files
    from drover.pipeline.data.documents import Rejection
    from drover.pipeline.data.reading import unit_documents
    from drover.pipeline.data.sources import input_files, reading_units
    from drover.pipeline.data.streams import PAGE

    files = [f"{path}/**" if Path(path).is_dir() else path for path in paths]
    source = FilesSource(kind="files", name=kind, paths=files, text_field=text_field)
    config = Config(shard=ShardConfig(sources=[source]))
    rejected: list[Rejection] = []
    for payload in reading_units(config.shard, listed_files(input_files(config))):
        first = next((item for item in unit_documents(payload) if not isinstance(item, Rejection)), None)
        if first and PAGE.match(first[0].text):
            payload["source"]["html"] = "fields"
        for item in unit_documents(payload):
            if isinstance(item, Rejection):
                rejected.append(item)
            elif item[0].text.strip():
                yield item[0].text
    if rejected:
        say("classifier", f"warning: {len(rejected):,} {kind} documents could not be read; the first is {rejected[0]}")


def measure(path: Path, held_out: dict[str, list[str]]) -> None:
    """Print the accuracy of a model, and scores for `min_score`, on documents that it was not trained on."""
    import numpy as np

    from drover.pipeline.data.filters.classifier import Classifier

    own = Classifier(kind="classifier", path=str(path), label=GOOD)
    good, bad = (np.sort([own.score(text) for text in texts]) for texts in (held_out[GOOD], held_out[BAD]))
    right = (good >= 0.5).sum() + (bad < 0.5).sum()
    say("classifier", f"on {len(good):,} good and {len(bad):,} bad documents that it was not trained on: accuracy "
                      f"{right / (len(good) + len(bad)):.1%} at a score of 0.5")
    rows = [["min_score", "bad that pass", "good that pass"]]
    for passing in sorted({int(share * len(bad)) for share in PASSING}):  # of few documents the same for two shares
        least = min(1, round(bad[-1 - passing] + 1e-6, 6))
        rows.append([f"{least:.6f}", *(f"{(scores >= least).mean():.1%}" for scores in (bad, good))])
    draw(table(rows, rows[0]))


main = Program("python -m drover.tools.classifier", __doc__, add_options, work)

if __name__ == "__main__":
    sys.exit(main())
