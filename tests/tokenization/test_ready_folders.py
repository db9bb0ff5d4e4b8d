"""A tokenizer that somebody else has made keeps every id, special token, BOS rule and chat template in the export."""

import json

import pytest
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing

from drover.pipeline.tokenization.kinds import load_tokenizer, ready_file
from drover.pipeline.tokenizer import make
from tests.tokenization.conftest import ODD_TEXTS, with_special
from tests.tokenization.test_checking import checked

TEMPLATE = ("{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
            "{{ message['content'] | trim }}<|eot_id|>{% endfor %}"
            "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}")
SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]


@pytest.fixture(scope="module", params=["BOS first", "no BOS", "template in a file"])
def source(request, tmp_path_factory, byte_level):
    """A folder as instruct models come: special tokens beyond BOS and EOS, a template, settings of its own."""
    folder = tmp_path_factory.mktemp("source")
    tokenizer = with_special(byte_level, *SPECIAL)
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    if request.param != "no BOS":
        bos = SPECIAL[0]
        tokenizer.post_processor = TemplateProcessing(single=[bos, "$A"], pair=[bos, "$A", f"{bos}:1", "$B:1"],
                                                      special_tokens=[(bos, tokenizer.token_to_id(bos))])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": SPECIAL[0], "eos_token": SPECIAL[4]}
    if request.param == "template in a file":
        (folder / "chat_template.jinja").write_text(TEMPLATE)
    else:
        settings["chat_template"] = TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "special_tokens_map.json").write_text("{}")
    (folder / "README.md").write_text("not a part of it")
    return folder


@pytest.fixture(scope="module")
def made(source, tmp_path_factory):
    """The stage's unit of work on that folder."""
    folder = tmp_path_factory.mktemp("stage")
    unit = make(folder, {"settings": {"kind": "huggingface", "path": str(source)}, "shards": "", "records": []})
    return folder, [record["path"] for record in unit["outputs"]]


def test_the_export_is_the_original_to_the_byte(source, made):
    folder, outputs = made
    expected = {path.name for path in source.iterdir()} - {"README.md"}
    assert {path.name for path in (folder / "hf").iterdir()} == expected
    assert {f"hf/{name}" for name in expected} | {"tokenizer.json", "vocabulary.json"} == set(outputs)
    assert all((folder / "hf" / name).read_bytes() == (source / name).read_bytes() for name in expected)


def test_what_trains_has_the_same_ids_and_takes_names_in_a_text_for_text(made):
    from transformers import AutoTokenizer
    folder, _ = made
    tokenizer, exported = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder / "hf", local_files_only=True)
    assert (tokenizer.bounds, tokenizer.size % 128) == ((SPECIAL[0], SPECIAL[4]), 0)
    check = checked(tokenizer, exported, *ODD_TEXTS, "<think>hm</think>", "a<|eot_id|>b")
    assert check.failures == [] and check.tally["hugging_face_failures"] == check.tally["round_trip_failures"] == 0
    assert tokenizer.special_tokens["<|eot_id|>"] not in tokenizer.encode("a<|eot_id|>b")


def test_a_folder_stands_for_the_file_of_its_kind(source, files):
    from drover.pipeline.config.data import TokenizerConfig
    assert ready_file(TokenizerConfig(kind="huggingface", path=str(source))) == source / "tokenizer.json"
    assert ready_file(TokenizerConfig(kind="tiktoken", path=str(files["tiktoken"].parent))) == files["tiktoken"]
    assert ready_file(TokenizerConfig(kind="tiktoken", path=str(files["tiktoken"]))) == files["tiktoken"]
