"""The README's picture is of the report that the demo makes now."""

from drover.pipeline.core.files import read_json
from tests.reporting.picture import RECORD, REPOSITORY, hashes


def test_the_picture_is_of_todays_demo():
    record = read_json(RECORD)
    assert record == {**record, **hashes()}, "make it again: make demo picture"
    assert f"**{record['bits_per_byte']:.2f} bits per byte**" in (REPOSITORY / "README.md").read_text()
