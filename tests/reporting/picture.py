"""docs/report.png, the README's picture of the demo's report, and beside it a record of which demo that was.

    make demo picture      # needs Chromium
"""

import json
import shutil
import subprocess
import sys
import tempfile
from hashlib import sha256
from pathlib import Path

from drover.model.config import ModelConfig
from drover.pipeline.config.loading import load_config
from drover.pipeline.contract.run import run_in
from drover.pipeline.reporting import plots
from drover.pipeline.reporting.facts import collect
from drover.pipeline.reporting.render import compose, html

REPOSITORY = Path(__file__).resolve().parents[2]
PICTURE, RECORD = (REPOSITORY / "docs" / name for name in ("report.png", "report.json"))
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def expected():
    """What a picture of today's demo shows, by its configuration and the report's templates."""
    config = load_config(REPOSITORY / "configs/demo.yaml")
    model = ModelConfig(**{**config.model.model_dump(), "vocab_size": config.tokenizer.vocab_size})
    looks = b"".join(path.read_bytes() for path in sorted(Path(plots.__file__).parent.glob("templates/*"))
                     if path.name != "report.md.j2")
    return {"steps": config.train.steps, "tokens": config.train.steps * config.train.batch_tokens,
            "parameters": model.parameter_count, "templates": sha256(looks).hexdigest(),
            "picture": sha256(PICTURE.read_bytes()).hexdigest()}


def main():
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None or not (REPOSITORY / "runs/demo/evaluate/manifest.json").is_file():
        print("The picture needs Chromium and a finished demo: install the one, and run `make demo`.", file=sys.stderr)
        return 2
    facts = collect(run_in(REPOSITORY / "runs/demo"))
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "report.html")
        page.write_text(html(compose(facts)), encoding="utf-8")
        subprocess.run([browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                        f"--user-data-dir={folder}/profile", "--window-size=1100,1480", f"--screenshot={PICTURE}",
                        page.as_uri()], check=True, capture_output=True)
    trained = {key: facts.counts("train")[key] for key in ("steps", "tokens", "parameters")}
    found = {**expected(), **trained, "bits_per_byte": facts.counts("evaluate")["bits_per_byte"]}
    RECORD.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"{PICTURE}: {found}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
