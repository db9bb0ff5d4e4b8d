"""A tokenizer that somebody else has made keeps every id, special token, BOS rule and chat template in the export."""

import json

import pytest
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing

from drover.launch import checks
from drover.pipeline.config.data import TokenizerConfig
from drover.pipeline.config.tree import Config
from drover.pipeline.core.errors import UserError
from drover.pipeline.tokenization import checking
from drover.pipeline.tokenization.files import ready_file, vocabulary_record
from drover.pipeline.tokenization.ready import ready_problems
from drover.pipeline.tokenization.tokenizer import load_tokenizer
from drover.pipeline.tokenizer import make
from tests.refusal import refused
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
    assert ready_file(TokenizerConfig(kind="huggingface", path=str(source))) == source / "tokenizer.json"
    assert ready_file(TokenizerConfig(kind="tiktoken", path=str(files["tiktoken"].parent))) == files["tiktoken"]
    assert ready_file(TokenizerConfig(kind="tiktoken", path=str(files["tiktoken"]))) == files["tiktoken"]


BOUNDS = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.fixture
def ready(byte_level, tmp_path):
    """Writes a ready folder: the ids that its template puts before and after a text, and settings beside it."""
    def write(before=(), after=(), config=BOUNDS, **more):
        tokenizer = with_special(byte_level, "<s>", "</s>")
        names = [f"x{number}" for number in range(len(before) + len(after))]
        if names:
            tokenizer.post_processor = TemplateProcessing(
                single=[*names[:len(before)], "$A", *names[len(before):]],
                special_tokens=list(zip(names, (*before, *after), strict=True)))
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        for name, content in {"tokenizer_config": config, **more}.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
        return tokenizer.token_to_id("<s>"), tokenizer.token_to_id("</s>")
    return write


def stage(folder, source):
    """The stage's unit of work, and whether the export as a check opens it puts BOS before a text."""
    make(folder, {"settings": {"kind": "huggingface", "path": str(source)}, "shards": "", "records": []})
    tokenizer, exported, _ = checking._loaded(folder, vocabulary_record(folder)["sha256"])
    return exported("a")["input_ids"][0] == tokenizer.bos_id


def config_of(folder):
    return Config(tokenizer=TokenizerConfig(kind="huggingface", path=str(folder)))


@pytest.mark.parametrize(("before", "after", "message"), [
    ([128000], [], r"puts 128000 \(no token\) around a text, but BOS is 900 \(<s>\)"),
    ([900, 900], [], "puts 900 .*, 900 "), ([900], [128001], "128001"), ([900], [77], r"77 \("),
    ([901], [], r"puts 901 \(</s>\)"), ([900, 5], [901], "puts 900")])
def test_what_is_put_around_a_text_is_bos_and_eos_or_nothing(ready, tmp_path, before, after, message):
    """A template of another tokenizer, or BOS twice. Refused before any stage has run; the advice works."""
    assert ready(before, after) == (900, 901)
    problem, = ready_problems(config_of(tmp_path))
    refused(UserError, message, checks._refuse_absent_files, config_of(tmp_path), ["tokenizer"])
    refused(UserError, message, make, tmp_path / "stage", {
        "settings": {"kind": "huggingface", "path": str(tmp_path)}, "shards": "", "records": []})
    exec(problem.partition("in Python: ")[2])  # noqa: S102
    assert ready_problems(config_of(tmp_path)) == [] and stage(tmp_path / "again", tmp_path)


@pytest.mark.parametrize(("config", "more", "message"), [
    ({"bos_token": "<bos>", "eos_token": "</s>"}, {}, "names the bos_token <bos>, which tokenizer.json does not have"),
    ({"eos_token": {"content": "<eos>"}}, {}, "names the eos_token <eos>"),
    (BOUNDS, {"special_tokens_map": {"bos_token": "</s>"}}, r"its BOS is 901 \(</s>\), not 900 \(<s>\)"),
    ({**BOUNDS, "additional_special_tokens": [f"<{number}>" for number in range(200)]}, {},
     r"adds 78 tokens \(<122>, .*\) beyond the 1,024 ids of the model"),
    ({"eos_token": {"content": "</s>"}}, {}, "cannot read the exported tokenizer: TypeError: .* Correct tokenizer"),
    ({**BOUNDS, "model_max_length": "long"}, {}, "cannot read the exported tokenizer: TypeError")])
def test_settings_that_transformers_reads_otherwise_or_not_are_refused(ready, tmp_path, config, more, message):
    ready([900], config=config, **more)
    refused(UserError, message, stage, tmp_path / "stage", tmp_path)
