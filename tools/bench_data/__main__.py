"""How fast is text made into tokens? Drover beside datatrove, in one run on one machine, as a table and JSON.

    python -m tools.bench_data
    python -m tools.bench_data --text big.txt more.txt --mb 100 --rounds 5 --json out.json
    python -m tools.bench_data --only encode,shard

Sections: encode (each encoder, and datatrove's DocumentTokenizer with the same tokenizer.json; two processes each),
shard (one process and two), filters and minhash (beside datatrove's, in one process), loader (training's batches beside
rows of a mapped file, by one thread). What is not installed or not there is left out with a word.

Every round measures one contender after the other, the order turned round each time, so that a slow moment of the
machine mostly meets all; a ratio is the median over rounds of ratios within a round. Beside the clock stands processor
time of the command and its children, which on a busy machine is the steadier of the two. "net" has the time of the same
command on sixteen short documents taken off: a large corpus pays for the start once.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.errors import UserError
from pipeline.files import write_json
from tools.bench_data.measuring import LeftOut, Row, version_of
from tools.bench_data.rules import filter_section, minhash_section
from tools.bench_data.stages import encode_section, shard_section

PACKAGES = ("datatrove", "tokenizers", "fastokens", "tiktoken", "sentencepiece", "pyarrow", "orjson", "rensa", "numpy")
PIECE_CHARACTERS = 20_000


def loader_section(*arguments: Any) -> list[Row]:
    """The section of that name in `loading.py`, which imports torch."""
    from tools.bench_data import loading

    return loading.loader_section(*arguments)


SECTIONS: dict[str, Callable[..., list[Row]]] = {
    "encode": encode_section, "shard": shard_section, "filters": filter_section, "minhash": minhash_section,
    "loader": loader_section}


def main(arguments: list[str] | None = None) -> int:
    """The command line; 2 for an error of the user's."""
    options = _parser().parse_args(arguments)
    try:
        return _run(options)
    except UserError as error:
        print(f"bench_data stops here: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Drover's data stages beside datatrove's: encode, shard, filters, "
                                                 "signatures.")
    parser.add_argument("--text", nargs="+", type=Path, help="text files to take (default: the standard library's)")
    parser.add_argument("--mb", type=float, default=12.0, help="MB of text at most (default %(default)s)")
    parser.add_argument("--vocab", type=int, default=16384, help="ids of the vocabulary (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each (default %(default)s)")
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, by comma (default %(default)s)")
    parser.add_argument("--json", type=Path, help="write all figures there")
    return parser


def _run(options: argparse.Namespace) -> int:
    names = options.only.split(",")
    if unknown := sorted(set(names) - set(SECTIONS)):
        raise UserError(f"--only does not know {', '.join(unknown)}; the sections are {', '.join(SECTIONS)}.")
    texts = corpus(options.text, options.mb)
    size = sum(len(text.encode()) for text in texts)
    facts = {"machine": platform.processor() or platform.machine(), "cpu": _cpu(), "cores": os.cpu_count(),
             "load": os.getloadavg()[0], "python": platform.python_version(), "text_mb": size / 1e6,
             "documents": len(texts), "rounds": options.rounds, "versions": _versions()}
    print(", ".join(f"{key} {value}" for key, value in facts.items() if key != "versions"))
    print(", ".join(f"{key} {value}" for key, value in facts["versions"].items()))
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="bench-data-") as place:
        for name in names:
            print(f"\n{name}")
            try:
                found = SECTIONS[name](texts, size / 1e6, Path(place), options)
            except (ImportError, AttributeError, LeftOut) as error:
                print(f"  left out: {error}")
                found = [{"section": name, "left_out": str(error)}]
            rows += found
            for row in found:
                if "left_out" not in row:
                    print(_shown(row))
    if options.json:
        write_json(options.json, {**facts, "rows": rows})
    return 0


def corpus(files: list[Path] | None, most_mb: float) -> list[str]:
    """Different texts of about `most_mb` in all: files as they are, long ones in pieces of 20,000 characters."""
    library = Path(sysconfig.get_paths()["stdlib"])
    paths = files or [path for path in sorted(library.rglob("*.py")) if "site-packages" not in path.parts]
    found: dict[str, None] = {}
    left = most_mb * 1e6
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            if files:
                raise UserError(f"{path} is not UTF-8 text.") from None
            continue
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}.") from None
        step = PIECE_CHARACTERS if files else max(1, len(text))
        for start in range(0, len(text), step):
            piece = text[start:start + step]
            if piece.strip() and piece not in found:
                found[piece] = None
                left -= len(piece.encode())
            if left <= 0:
                return list(found)
    return list(found)


def _shown(row: Row) -> str:
    unit = row.get("unit", "MB")
    cells = [f"  {row['name']:<42}",
             f"{row['wall_mb_per_s']:8.2f} {unit}/s", f"{row['cpu_mb_per_s']:8.2f} {unit}/cpu s"]
    if "start_s" in row and "net_mb_per_s" not in row:
        cells.append("net not measurable: more text, or an idler machine")
    elif "net_mb_per_s" in row:
        cells.append(f"{row['net_mb_per_s']:8.2f} MB/s net of {row['start_s']:.1f} s start")
    if "ratio_wall" in row:
        ratios = [f"{row[name]:.2f} ({word})" for name, word in (("ratio_wall", "clock"), ("ratio_cpu", "cpu"),
                                                                 ("ratio_net", "net")) if name in row]
        cells.append(f"x {', '.join(ratios)} of {row['beside']}")
    return "  ".join(cells)


def _versions() -> dict[str, str]:
    return {package: version for package in PACKAGES if (version := version_of(package))}


def _cpu() -> str:
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found[1] if found else "unknown"


if __name__ == "__main__":
    sys.exit(main())
