"""The gates: text that is lost and an export with other ids fail; what is known to happen is counted."""

import json
import re

import pytest
from tokenizers.normalizers import NFC, NFD, NFKC, Lowercase, Replace, Sequence, Strip, StripAccents

from drover.pipeline.core.errors import UserError
from drover.pipeline.data.documents import Document
from drover.pipeline.tokenization import checking
from drover.pipeline.tokenization.checking import Check, refuse_failures, summed
from drover.pipeline.tokenization.export import write_hugging_face
from drover.pipeline.tokenization.ready import open_tokenizer
from drover.pipeline.tokenization.reporting import described
from tests.data.filters.test_kinds import made
from tests.refusal import refused
from tests.tokenization.conftest import with_special


@pytest.fixture
def exported(vocabularies, tmp_path):
    """The exported tokenizer of a kind, as transformers loads it."""
    def load(vocabulary):
        from transformers import AutoTokenizer
        write_hugging_face(vocabulary, tmp_path)
        return AutoTokenizer.from_pretrained(tmp_path)
    return load


def checked(vocabulary, exported, *texts):
    check = Check(vocabulary, exported)
    for number, text in enumerate(texts):
        check.document(Document(text, "web", f"page-{number}", {}))
    return check


def test_numbers_of_a_source(vocabularies, exported):
    vocabulary = vocabularies["char"]
    tally = checked(vocabulary, exported(vocabulary), "ab cd", "漢 x\0").tally
    assert {name: count for name, count in tally.items() if count} == {
        "documents": 2, "text_bytes": 11, "characters": 9, "words": 4, "tokens": 5 + 3 + 2 + 1,
        "fallback_tokens": 3 + 1}
    refuse_failures(tally, [], vocabulary)


def test_of_a_very_long_document_the_beginning_is_checked(vocabularies, exported, monkeypatch):
    vocabulary, text = vocabularies["bpe"], "漢字 and words, 😀\n" * 40
    monkeypatch.setattr(checking, "PIECE", 100)
    tally = checked(vocabulary, exported(vocabulary), text, "short").tally
    assert (tally["documents"], tally["cut_documents"], tally["characters"]) == (2, 1, 105)


def test_an_export_with_other_ids_is_refused(vocabularies, exported):
    other = exported(vocabularies["unigram"])
    check = checked(vocabularies["bpe"], other, "def function(self): return None")
    assert check.tally["hugging_face_failures"] == 1
    refused(UserError, r"1 of 1 documents differ \(the document page-0 of web has other ids", refuse_failures,
            check.tally, check.failures, vocabularies["bpe"])


def test_an_export_without_bos_is_refused(vocabularies, exported):
    from tokenizers.processors import TemplateProcessing
    bare = exported(vocabularies["byte"])
    bare.backend_tokenizer.post_processor = TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
    assert checked(vocabularies["byte"], bare, "text").tally["hugging_face_failures"] == 1


@pytest.mark.parametrize(("normalizer", "text", "cure"), [
    (NFC(), "cafe\u0301", {"form": "NFC"}), (NFKC(), "ﬁne", {"form": "NFKC"}), (NFKC(), "cafe\u0301", {"form": "NFKC"}),
    (Replace("\r\n", "\n"), "a\r\nb", {"line_ends": True}), (Lowercase(), "One", None), (NFD(), "café", None),
    (Sequence([NFD(), StripAccents()]), "café", None), (Strip(), " a ", None),
    (Sequence([NFC(), Lowercase()]), "Cafe\u0301", None)])
def test_a_vocabulary_that_loses_text_is_refused_with_the_filter_that_cures_it(tmp_path, byte_level, exported,
                                                                               normalizer, text, cure):
    """Tried: with the filter nothing is lost."""
    lossy = with_special(byte_level, "<s>", "</s>")
    lossy.normalizer = normalizer
    lossy.save(str(tmp_path / "lossy.json"))
    vocabulary = open_tokenizer("huggingface", tmp_path / "lossy.json")
    check = checked(vocabulary, own := exported(vocabulary), "plain", text)
    assert check.tally["round_trip_failures"] == 1 and check.tally["hugging_face_failures"] == 0
    message = re.escape(json.dumps({"kind": "normalization", **cure})) if cure else "No setting of the filter"
    refused(UserError, rf"1 of 2 documents are decoded to other text .*page-1 of web .*became.*{message}",
            refuse_failures, check.tally, check.failures, vocabulary)
    if cure:
        mended = made(kind="normalization", **cure)(Document(text, "web", "x", {})).text
        assert not checked(vocabulary, own, mended).tally["round_trip_failures"]


def test_the_report_says_what_the_tokens_are_like(vocabularies, exported, texts):
    vocabulary = vocabularies["bpe"]
    check = checked(vocabulary, exported(vocabulary), *texts[:3])
    report = described(vocabulary, {"web": (total := summed([check.tally]))}, summed([]), check.seen, 0, 3)
    assert report["sources"]["web"]["bytes_per_token"] == round(total["text_bytes"] / total["tokens"], 6) > 1.5
    assert report["pieces"] == 1024 - 1 - 256 - 256 and 0 < report["unused_pieces"] < report["pieces"]
    assert report["training_sample"]["bytes_per_token"] is None and "validation_documents" not in report
