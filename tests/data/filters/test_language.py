"""Languages by fastText models: small real ones, whose making tests/data/filters/models/README.md tells."""

from pathlib import Path

import pytest

from drover.pipeline.config.section import identity
from drover.pipeline.core.errors import UserError
from tests.data.filters.test_kinds import made, outcome
from tests.refusal import refused

pytest.importorskip("fasttext", reason="of the extra `clean`")

MODELS = Path(__file__).parent / "models"
TWO, WITH_SCRIPTS = MODELS / "two_letters.ftz", MODELS / "with_scripts.bin"
ENGLISH = "The ship and the rain\nhave been seen by them, and she would come\r\nif you had asked."
GERMAN = "Der Regen und das Schiff sind nicht gekommen,\nund wenn du mich gefragt hättest."
FRENCH = "Le soir la ville est à nous et ils ont vu la rivière."
NONE = "0101 // {} []"


def outcomes(languages, path=TWO, **wanted):
    own = made(kind="language", path=str(path), languages=languages, **wanted)
    own.open()
    return own, [outcome(own, text) for text in (ENGLISH, GERMAN, FRENCH, NONE)]


def test_other_languages_and_doubtful_ones_are_dropped():
    other, doubtful = "of another language", "of no language with a probability of 0.65"
    own, result = outcomes(["en"])
    assert own.reads() == [TWO] and "path" not in identity(own)
    assert result == [None, other, other, doubtful]
    assert own.findings() == {"languages": {"de": 1, "en": 1, "fr": 1, "unknown": 1}}
    assert outcomes(["de", "fr"])[1] == [other, None, None, doubtful]
    assert outcomes(["de", "fr"], keep_unknown=True)[1] == [other, None, None, None]
    assert outcomes(["en"], min_probability=0.0)[1] == [None, other, other, other]


def test_labels_are_those_of_the_model():
    assert outcomes(["eng_Latn", "fra_Latn"], WITH_SCRIPTS)[1][:3] == [None, "of another language", None]
    refused(UserError, r"is to keep eng, but the model .* knows 3 labels.*did you mean eng_Latn",
            made(kind="language", path=str(WITH_SCRIPTS), languages=["eng"]).open)


def test_characters_limits_the_text_that_is_classified():
    text, wanted = f"{ENGLISH} {GERMAN * 20}", {"kind": "language", "path": str(TWO), "languages": ["en"]}
    assert outcome(made(**wanted, characters=len(ENGLISH)), text) is None
    assert outcome(made(**wanted), text) == "of another language"


def test_what_is_no_model_is_refused(tmp_path):
    path = tmp_path / "lid.ftz"
    own = made(kind="language", path=str(path), languages=["en"])
    refused(UserError, "is not there", own.open)
    path.write_text("no model")
    refused(UserError, "is no fastText model", own.open)
