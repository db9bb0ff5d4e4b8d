"""What holds for every kind of vocabulary, on odd text and on text that nobody thought of."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drover.pipeline.tokenization.conversion import open_tokenizer
from drover.pipeline.tokenization.tokenizer import BOS, EOS, SPECIAL_TOKENS, WORD_MARK
from tests.refusal import refused
from tests.tokenization.conftest import KINDS, ODD_TEXTS

every_kind = pytest.mark.parametrize("kind", KINDS)
OWN = ("bpe", "unigram", "tiktoken", "byte", "char")
any_text = st.text(st.characters(codec="utf-8"), max_size=60) | st.text("ab =\n\t\r<|>_" + WORD_MARK, max_size=60)


@pytest.fixture(scope="module")
def exported(folders):
    """What transformers loads of every kind's export."""
    from transformers import AutoTokenizer
    return {kind: AutoTokenizer.from_pretrained(folder / "hf") for kind, folder in folders.items()}


def same_as_exported(vocabulary, tokenizer, text):
    ids = vocabulary.encode(text)
    assert tokenizer(text, split_special_tokens=True)["input_ids"] == [vocabulary.bos_id, *ids]
    assert tokenizer(text, split_special_tokens=True, add_special_tokens=False)["input_ids"] == ids
    assert tokenizer.decode([vocabulary.bos_id, *ids], skip_special_tokens=True) == vocabulary.decode(ids)


def comes_back(vocabulary, text):
    ids = vocabulary.encode(text)
    kept = text.replace(WORD_MARK, " ") if vocabulary.kind == "sentencepiece" else text
    assert vocabulary.decode(ids) == kept
    assert b"".join(map(vocabulary.token_bytes, ids)) == kept.encode()
    assert not vocabulary.special_ids & set(ids) and all(0 <= token < vocabulary.used for token in ids)


@every_kind
def test_odd_and_real_text_comes_back_and_has_equal_ids_in_the_export(vocabularies, exported, texts, kind):
    """Names of special tokens in a text stay text."""
    assert exported[kind].eos_token_id == vocabularies[kind].eos_id
    names = (f"x {name} y{name}" for name in vocabularies[kind].special_tokens)
    for text in [*ODD_TEXTS, *names, *texts]:
        comes_back(vocabularies[kind], text)
        same_as_exported(vocabularies[kind], exported[kind], text)


@every_kind
def test_special_tokens_that_a_program_joins_to_a_text_are_tokens_in_the_export(vocabularies, exported, kind):
    """By a chat template that is added later, or as `text + eos_token`."""
    vocabulary, tokenizer = vocabularies[kind], exported[kind]
    bos, eos = vocabulary.bounds
    expected = [vocabulary.bos_id, *vocabulary.encode("hi"), vocabulary.eos_id]
    assert tokenizer("hi" + tokenizer.eos_token)["input_ids"] == expected
    assert tokenizer(["hi" + eos, eos])["input_ids"] == [expected, [vocabulary.bos_id, vocabulary.eos_id]]
    assert vocabulary.special_ids.isdisjoint(vocabulary.encode(bos + "hi" + eos))


@every_kind
def test_special_tokens_that_are_added_later_are_tokens_and_stay_text_in_documents(
        vocabularies, exported, texts, tmp_path, kind):
    """As for a chat template with names of its own; the folder is saved, and opened by both programs."""
    from copy import deepcopy

    from transformers import AutoTokenizer
    vocabulary, start, end = vocabularies[kind], "<|im_start|>", "<|im_end|>"
    changed = deepcopy(exported[kind])
    changed.add_special_tokens({"additional_special_tokens": [start, end]})
    changed.chat_template = ("{% for one in messages %}<|im_start|>{{ one.role }}\n{{ one.content }}<|im_end|>"
                             "{% endfor %}")
    changed.save_pretrained(tmp_path)
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), open_tokenizer("huggingface", tmp_path / "tokenizer.json")
    first = theirs.convert_tokens_to_ids(start)
    assert first >= vocabulary.used and ours.special_tokens[end] == theirs.convert_tokens_to_ids(end) == first + 1
    assert theirs.apply_chat_template([{"role": "user", "content": "Hello é"}], return_dict=False) == [
        first, *vocabulary.encode("user\nHello é"), first + 1]
    for text in [*ODD_TEXTS, f"a {start}b{end} {vocabulary.bounds[1]}", *texts]:
        assert ours.encode(text) == vocabulary.encode(text)
        same_as_exported(vocabulary, theirs, text)


@every_kind
@settings(max_examples=60)
@given(text=any_text)
def test_any_text_comes_back_and_has_equal_ids_in_the_export(vocabularies, exported, kind, text):
    comes_back(vocabularies[kind], text)
    same_as_exported(vocabularies[kind], exported[kind], text)


def test_there_are_llama_3s_256_special_tokens(vocabularies):
    for kind in OWN:
        vocabulary = vocabularies[kind]
        ids = [vocabulary.special_tokens[name] for name in SPECIAL_TOKENS]
        assert ids == list(range(ids[0], ids[0] + 256))
        assert (vocabulary.bos_id, vocabulary.eos_id) == (ids[0], ids[1]) and vocabulary.bounds == (BOS, EOS)
    first = ("begin_of_text end_of_text reserved_special_token_0 reserved_special_token_1 finetune_right_pad_id "
             "step_id start_header_id end_header_id eom_id eot_id python_tag image reserved_special_token_2")
    assert [*SPECIAL_TOKENS[:13], SPECIAL_TOKENS[255]] == [
        f"<|{name}|>" for name in (*first.split(), "reserved_special_token_245")]


@every_kind
def test_the_size_is_padded_and_padding_stands_for_nothing(vocabularies, kind):
    vocabulary = vocabularies[kind]
    assert vocabulary.size % 128 == 0 and vocabulary.used <= vocabulary.size < vocabulary.used + 128
    silent = [vocabulary.bos_id, vocabulary.eos_id, *range(vocabulary.used, vocabulary.size)]
    assert all(vocabulary.token_bytes(token) == b"" for token in silent)
    assert vocabulary.decode([*silent, *vocabulary.encode("text"), *silent]) == "text"
    refused(ValueError, "is not an id of this", vocabulary.decode, [0, vocabulary.size])
