"""docs/after-pretraining.md does what it says: its commands and scripts, in order, on a tiny export."""

import re
import shutil

import pytest
import torch

from drover.pipeline.formats.weights import open_weights
from tests import pages
from tests.conftest import REPOSITORY
from tests.pages import checkout, commands, typed
from tests.tiny_models import for_tokenizer, write_huggingface
from tests.tokenization.conftest import byte_level, chunks, files, texts, vocabularies  # noqa: F401

pytestmark = pytest.mark.slow
PAGE = "after-pretraining"
QUESTION = [{"role": "user", "content": "What is 2 + 2?"}]


@pytest.fixture(scope="module")
def home(tmp_path_factory, vocabularies, files):  # noqa: F811
    """A folder with the page's files, and 16 times each of its examples."""
    folder, tokenizer = checkout(tmp_path_factory.mktemp("home")), vocabularies["bpe"]
    export = write_huggingface(folder / "runs/demo/convert/hf", for_tokenizer(tokenizer, context_length=256), tokenizer)
    shutil.copy(files["bpe"], export)
    examples = re.findall(r"```json\n(.*?)```", (REPOSITORY / f"docs/{PAGE}.md").read_text(), re.DOTALL)
    for name, text in [*pages.files(PAGE).items(), *zip(("conversations.jsonl", "preferences.jsonl"),
                                                  (16 * example for example in examples), strict=True)]:
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def outcomes(home):
    """The result of every command of the page, in their order."""
    return {command: typed(command, home) for command in commands(PAGE, needs=[])}


def test_every_command_runs(home, outcomes):
    assert len(outcomes) >= 6
    for command, result in outcomes.items():
        assert result.returncode == 0, f"{command}\n{result.stdout}{result.stderr}"


def test_training_learns_answers_with_their_end(home, outcomes, vocabularies):  # noqa: F811
    """The rows of special tokens, too, which the conversations have as ids."""
    from transformers import AutoTokenizer
    vocabulary, tokenizer = vocabularies["bpe"], AutoTokenizer.from_pretrained(home / "demo-dpo")
    start, end, turn = (vocabulary.special_tokens[name] for name in (
        "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"))
    assert tokenizer.apply_chat_template(QUESTION, return_dict=False) == [
        vocabulary.bos_id, start, *vocabulary.encode("user"), end, *vocabulary.encode("\n\nWhat is 2 + 2?"), turn]
    assert tokenizer.eos_token_id == turn
    with open_weights(home / "runs/demo/convert/hf") as base, open_weights(home / "demo-sft") as sft, \
            open_weights(home / "demo-dpo") as dpo:
        before, trained, preferred = (weights.read("output.weight") for weights in (base, sft, dpo))
    assert not torch.equal(before[turn], trained[turn]) and not torch.equal(trained, preferred)


@pytest.mark.parametrize("model", ["demo-sft", "demo-dpo"])
def test_chat_writes_the_answer_that_transformers_writes(home, outcomes, vocabularies, model):  # noqa: F811
    from transformers import AutoModelForCausalLM, AutoTokenizer
    ids = AutoTokenizer.from_pretrained(home / model).apply_chat_template(
        QUESTION, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    theirs = AutoModelForCausalLM.from_pretrained(home / model).generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=256 - ids.shape[1], do_sample=False)
    answer = b"".join(map(vocabularies["bpe"].token_bytes, theirs[0, ids.shape[1]:].tolist()))
    [result] = [result for command, result in outcomes.items() if f"{model} --chat" in command]
    assert result.stdout.strip() == answer.decode(errors="replace").strip()
