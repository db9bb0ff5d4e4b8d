"""The gates: text that is lost and an export with other ids fail; what is known to happen is counted."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.normalizers import NFC, Lowercase, Strip

from drover.pipeline.core.errors import UserError
from drover.pipeline.data.documents import Document
from drover.pipeline.tokenization.checking import check, refuse_failures
from drover.pipeline.tokenization.conversion import open_tokenizer, write_hugging_face
from tests.refusal import refused
from tests.tokenization.conftest import with_special


@pytest.fixture
def exported(tmp_path):
    """The exported tokenizer of a kind, as transformers loads it."""
    def load(vocabulary):
        from transformers import AutoTokenizer
        write_hugging_face(vocabulary, tmp_path)
        return AutoTokenizer.from_pretrained(tmp_path)
    return load


def checked(vocabulary, exported, *texts):
    return check((Document(text, "web", f"page-{number}", {}) for number, text in enumerate(texts)), vocabulary,
                 exported)


def test_an_export_with_other_ids_or_without_bos_is_refused(vocabularies, exported):
    other = exported(vocabularies["unigram"])
    result = checked(vocabularies["bpe"], other, "def function(self): return None")
    refused(UserError, r"1 of 1 documents differ \(the document page-0 of web has other ids", refuse_failures,
            result["tally"], result["failures"])
    from tokenizers.processors import TemplateProcessing
    bare = exported(vocabularies["byte"])
    bare.backend_tokenizer.post_processor = TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
    assert checked(vocabularies["byte"], bare, "text")["tally"]["hugging_face_failures"] == 1


@pytest.mark.parametrize(("normalizer", "text"), [(NFC(), "cafe\u0301"), (Lowercase(), "One"), (Strip(), " a ")])
def test_a_vocabulary_that_loses_text_is_refused(tmp_path, byte_level, exported, normalizer, text):
    lossy = with_special(byte_level, "<s>", "</s>")
    lossy.normalizer = normalizer
    lossy.save(str(tmp_path / "lossy.json"))
    vocabulary = open_tokenizer("huggingface", tmp_path / "lossy.json")
    result = checked(vocabulary, exported(vocabulary), "plain", text)
    refused(UserError, r"1 of 2 documents are decoded to other text .*page-1 of web .*became.*filter `normalization`",
            refuse_failures, result["tally"], result["failures"])


def test_a_vocabulary_whose_tokens_do_not_spell_the_text_is_refused(tmp_path, exported):
    """Generation streams by them. The decoder makes a space of the suffix, which one token alone does not show."""
    names = ["<s>", "</s>", "l", "o", "w", "w</w>"]
    model = models.BPE({name: token for token, name in enumerate(names)}, [], end_of_word_suffix="</w>")
    library = Tokenizer(model)
    library.pre_tokenizer, library.decoder = pre_tokenizers.WhitespaceSplit(), decoders.BPEDecoder("</w>")
    library.save(str(tmp_path / "suffix.json"))
    vocabulary = open_tokenizer("huggingface", tmp_path / "suffix.json")
    assert vocabulary.decode(vocabulary.encode("low low")) == "low low"
    result = checked(vocabulary, exported(vocabulary), "low low")
    refused(UserError, r"1 of 1 documents .*' low' at character 3 became '</w>low</w>'", refuse_failures,
            result["tally"], result["failures"])
