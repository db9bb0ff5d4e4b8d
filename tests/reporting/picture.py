"""docs/report.png, the README's picture of the demo's report, and the record in it of which demo that was.

    make demo picture      # needs Chromium
"""

import json
import shutil
import struct
import subprocess
import sys
import tempfile
import zlib
from hashlib import sha256
from pathlib import Path

from drover.model.config import ModelConfig
from drover.pipeline.config.loading import load_config
from drover.pipeline.contract.manifest import read_manifest
from drover.pipeline.reporting import plots

REPOSITORY = Path(__file__).resolve().parents[2]
PICTURE = REPOSITORY / "docs/report.png"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WIDTH, HEIGHT = 1000, 1480
HEADER = 33
"""Bytes of a PNG before its second chunk."""


def expected() -> dict[str, object]:
    """What the picture of today's demo and templates shows."""
    config, looks = load_config(REPOSITORY / "configs/demo.yaml"), sha256()
    for path in sorted(Path(plots.__file__).parent.glob("templates/*")):
        looks.update(path.read_bytes())
    model = ModelConfig(**{**config.model.model_dump(), "vocab_size": config.tokenizer.vocab_size})
    return {"steps": config.train.steps, "tokens": config.train.steps * config.train.batch_tokens,
            "parameters": model.parameter_count, "looks": looks.hexdigest()}


def record(picture: Path = PICTURE) -> dict[str, object]:
    """What was noted in the picture when it was made."""
    content = picture.read_bytes()
    [length] = struct.unpack(">I", content[HEADER:HEADER + 4])
    return json.loads(content[HEADER + 8:HEADER + 8 + length].partition(b"\0")[2])


def main() -> int:
    run = REPOSITORY / "runs/demo"
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    train, evaluate = read_manifest(run / "train"), read_manifest(run / "evaluate")
    if browser is None or train is None or evaluate is None or not (run / "report.html").is_file():
        print("The picture needs Chromium and a finished demo: install the one, and run `make demo`.", file=sys.stderr)
        return 2
    found = {**expected(), **{key: train.counts[key] for key in ("steps", "tokens", "parameters")},
             "bits_per_byte": evaluate.counts["bits_per_byte"]}
    with tempfile.TemporaryDirectory() as folder:
        shot = Path(folder, "shot.png")
        subprocess.run([browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                        f"--user-data-dir={folder}/profile", f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={shot}",
                        (run / "report.html").as_uri()], check=True, capture_output=True)
        content = shot.read_bytes()
    text = b"tEXt" + b"drover\0" + json.dumps(found).encode()
    chunk = struct.pack(">I", len(text) - 4) + text + struct.pack(">I", zlib.crc32(text))
    PICTURE.write_bytes(content[:HEADER] + chunk + content[HEADER:])
    print(f"{PICTURE}: {found}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
