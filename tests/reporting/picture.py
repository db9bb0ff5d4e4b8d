"""docs/report.png, the README's picture of the demo's report, and beside it a record of which demo that was.

    make demo picture      # needs the command chromium
"""

import json
import subprocess
import tempfile
from hashlib import sha256
from pathlib import Path

from drover.pipeline.contract.run import run_in
from drover.pipeline.reporting import render
from drover.pipeline.reporting.facts import collect
from drover.pipeline.reporting.render import compose, html

REPOSITORY = Path(__file__).resolve().parents[2]
PICTURE, RECORD = (REPOSITORY / "docs" / name for name in ("report.png", "report.json"))


def hashes():
    """Of the picture, and of the report's templates."""
    looks = b"".join(path.read_bytes() for path in sorted(Path(render.__file__).parent.glob("templates/*"))
                     if path.name != "report.md.j2")
    return {"templates": sha256(looks).hexdigest(), "picture": sha256(PICTURE.read_bytes()).hexdigest()}


def main():
    facts = collect(run_in(REPOSITORY / "runs/demo"))
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "report.html")
        page.write_text(html(compose(facts)), encoding="utf-8")
        subprocess.run(["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                        f"--user-data-dir={folder}/profile", "--window-size=1100,1480", f"--screenshot={PICTURE}",
                        page.as_uri()], check=True, capture_output=True)
    record = {**hashes(), "bits_per_byte": facts.counts("evaluate")["bits_per_byte"]}
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
