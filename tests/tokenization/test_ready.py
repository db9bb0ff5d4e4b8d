"""Ready tokenizers: their files, what is wrong with some of them, and an export that keeps every id, special token, BOS
rule and chat template."""

import json
import shutil

import pytest
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing

from drover.launch import checks
from drover.pipeline.config.data import TokenizerConfig
from drover.pipeline.config.tree import Config
from drover.pipeline.core.errors import UserError
from drover.pipeline.storage.model_hub import hub_folder
from drover.pipeline.tokenization import checking
from drover.pipeline.tokenization.conversion import open_tokenizer, ready_problems
from drover.pipeline.tokenization.files import input_files, vocabulary_record
from drover.pipeline.tokenization.tokenizer import load_tokenizer
from drover.pipeline.tokenizer import make
from tests.hub_server import hub  # noqa: F401 - a fixture
from tests.refusal import refused, table
from tests.tokenization.conftest import ODD_TEXTS, rank_lines, with_special
from tests.tokenization.test_checking import checked

TEMPLATE = ("{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
            "{{ message['content'] | trim }}<|eot_id|>{% endfor %}"
            "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}")
SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
BOUNDS = {"bos_token": "<s>", "eos_token": "</s>"}


def test_another_file_than_the_recorded_one_is_refused(folders, tmp_path):
    place = shutil.copytree(folders["bpe"], tmp_path / "bpe")
    (place / "hf/tokenizer.json").write_bytes((folders["unigram"] / "hf/tokenizer.json").read_bytes())
    refused(UserError, r"not the file that .*vocabulary.json was written for", load_tokenizer, place)
    (place / "hf/tokenizer.json").unlink()
    refused(UserError, "missing", load_tokenizer, place)
    (place / "vocabulary.json").unlink()
    refused(UserError, "--stage tokenizer", load_tokenizer, place)


def test_a_broken_rank_file_names_the_line(tmp_path):
    path, ranks = tmp_path / "tokenizer.model", rank_lines(bytes([value]) for value in range(256))
    for line, message in ((b"no base64! 0", ":257: not a line"), (b"QUJD 300", "do not run from 0 to 256")):
        path.write_bytes(ranks + line)
        refused(UserError, message, open_tokenizer, "tiktoken", path)


@pytest.mark.parametrize("kind", ["sentencepiece", "tiktoken", "huggingface"])
def test_a_file_of_another_kind_is_named(tmp_path, kind):
    path = tmp_path / "file"
    path.write_text("{}\n")
    refused(UserError, str(path), open_tokenizer, kind, path)


@pytest.mark.parametrize(("tokens", "settings", "bounds"), table("""
    <s> </s> ->  -> <s> </s>
    <a> <z> <s> </s> -> {"bos_token": "<a>", "eos_token": {"content": "<z>"}} -> <a> <z>
    <|endoftext|> <|im_start|> -> {"bos_token": null, "eos_token": "<|endoftext|>"} -> <|endoftext|> <|endoftext|>
    </s> ->  -> has no token <|begin_of_text|> or .*tokenizer_config.json
    <s> -> {"eos_token": {"content": "<eos>"}} -> has no token <eos>: Drover puts the eos_token
    """, str.split))
def test_bos_and_eos_are_known_or_the_error_names_what_to_add(tmp_path, byte_level, tokens, settings, bounds):
    path = tmp_path / "tokenizer.json"
    with_special(byte_level, *tokens).save(str(path))
    if settings:
        (tmp_path / "tokenizer_config.json").write_text(settings)
    if "has no" not in bounds:
        assert open_tokenizer("huggingface", path).bounds == tuple(bounds.split())
    else:
        refused(UserError, bounds, open_tokenizer, "huggingface", path)


@pytest.fixture(scope="module", params=["BOS first", "no BOS, template in a file"])
def source(request, tmp_path_factory, byte_level):
    """A folder as instruct models come: special tokens beyond BOS and EOS, a template, settings of its own."""
    folder = tmp_path_factory.mktemp("source")
    tokenizer = with_special(byte_level, *SPECIAL)
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": SPECIAL[0], "eos_token": SPECIAL[4]}
    if request.param == "BOS first":
        bos = SPECIAL[0]
        tokenizer.post_processor = TemplateProcessing(single=[bos, "$A"], pair=[bos, "$A", f"{bos}:1", "$B:1"],
                                                      special_tokens=[(bos, tokenizer.token_to_id(bos))])
        settings["chat_template"] = TEMPLATE
    else:
        (folder / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "special_tokens_map.json").write_text("{}")
    (folder / "README.md").write_text("not a part of it")
    return folder


def test_the_export_is_the_original_and_has_the_ids_that_train(source, tmp_path):
    """To the byte. Names of special tokens in a text are text for training."""
    from transformers import AutoTokenizer
    task = make(tmp_path, {"settings": {"kind": "huggingface", "path": str(source)}})
    expected = {path.name for path in source.iterdir()} - {"README.md"}
    assert {path.name for path in (tmp_path / "hf").iterdir()} == expected
    assert {record["path"] for record in task["outputs"]} == {*(f"hf/{name}" for name in expected), "tokenizer.json",
                                                              "vocabulary.json"}
    assert all((tmp_path / "hf" / name).read_bytes() == (source / name).read_bytes() for name in expected)
    tokenizer = load_tokenizer(tmp_path)
    exported = AutoTokenizer.from_pretrained(tmp_path / "hf", local_files_only=True)
    assert (tokenizer.bounds, tokenizer.size % 128) == ((SPECIAL[0], SPECIAL[4]), 0)
    assert checked(tokenizer, exported, *ODD_TEXTS, "<think>hm</think>", "a<|eot_id|>b")["failures"] == []
    assert tokenizer.special_tokens["<|eot_id|>"] not in tokenizer.encode("a<|eot_id|>b")


@pytest.mark.parametrize(("kind", "file"), table("""
    huggingface -> tokenizer.json
    sentencepiece -> tokenizer.model
    tiktoken -> original/tokenizer.model"""))
def test_a_name_on_the_hub_stands_for_the_file_of_its_kind(tmp_path, hub, kind, file):  # noqa: F811
    (tmp_path / "theirs/original").mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "original/tokenizer.model"):
        (tmp_path / "theirs" / name).write_text("{}")
    hub.push("someone/llama", tmp_path / "theirs")
    config = Config(tokenizer=TokenizerConfig(kind=kind, path="someone/llama"))
    refused(UserError, "someone/llama is no folder here, .*hf download", input_files, config)
    folder = hub_folder("someone/llama", download=True)
    assert input_files(config)[0] == ("tokenizer", folder / file)


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
    return write


def stage(folder, source):
    """The stage's task of making it, and whether the export as a check opens it puts BOS before a text."""
    make(folder, {"settings": {"kind": "huggingface", "path": str(source)}})
    tokenizer, exported, _ = checking._loaded(folder, vocabulary_record(folder)["sha256"])
    return exported("a")["input_ids"][0] == tokenizer.bos_id


@pytest.mark.parametrize(("before", "after", "message"), [
    ([128000], [], r"makes 128000 \(no token\), .* of the text 'a', but BOS is 900 \(<s>\)"),
    ([900, 900], [], "makes 900 .*, 900 "), ([900], [77], r"77 \("), ([901], [], r"makes 901 \(</s>\)")])
def test_what_is_put_around_a_text_is_bos_and_eos_or_nothing(ready, tmp_path, before, after, message):
    """A template of another tokenizer, or BOS twice. Refused before any stage has run; the advice works."""
    ready(before, after)
    config = Config(tokenizer=TokenizerConfig(kind="huggingface", path=str(tmp_path)))
    problem, = ready_problems(config)
    refused(UserError, message, checks._refuse_absent_files, config, ["tokenizer"])
    refused(UserError, message, stage, tmp_path / "stage", tmp_path)
    exec(problem.partition("in Python: ")[2])  # noqa: S102
    assert ready_problems(config) == [] and stage(tmp_path / "again", tmp_path)


@pytest.mark.parametrize(("config", "more", "message"), [
    (BOUNDS, {"special_tokens_map": {"bos_token": "</s>"}}, "its BOS is 901, not 900"),
    ({**BOUNDS, "additional_special_tokens": [f"<{number}>" for number in range(200)]}, {},
     r"it adds 78 tokens \(<122>, .*\) beyond the 1,024 ids of the model"),
    ({"eos_token": {"content": "</s>"}}, {}, "cannot read the exported tokenizer: TypeError: .* Correct tokenizer")])
def test_settings_that_transformers_reads_otherwise_or_not_are_refused(ready, tmp_path, config, more, message):
    ready([900], config=config, **more)
    refused(UserError, message, stage, tmp_path / "stage", tmp_path)
