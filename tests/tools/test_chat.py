"""The tool that writes text: what it prints is what the model writes, from every kind of path."""

import builtins
import re
import shutil

import pytest

from drover.model.generation.stream import generate
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import write_json
from drover.pipeline.tokenization.conversion import byte_tokenizer
from drover.pipeline.tokenization.tokenizer import BOS
from drover.tools import chat
from drover.tools.chat import ChatTemplate, main
from tests.hub_server import hub  # noqa: F401 - a fixture
from tests.refusal import printed, refused
from tests.tiny_models import for_tokenizer, write_huggingface, write_run

TOKENIZER = byte_tokenizer()
CHAT = ("--chat", "--temperature", "0", "--max-tokens", "12")
TEMPLATE = ("{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
            "{{ message.content }}<|eot_id|>{% endfor %}"
            "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}")


@pytest.fixture(scope="module")
def model():
    return for_tokenizer(TOKENIZER, context_length=256)


@pytest.fixture(scope="module")
def places(model, tmp_path_factory):
    """The same model as a run and as a Hugging Face folder that has a chat template."""
    home = tmp_path_factory.mktemp("models")
    folder = write_huggingface(home / "hf", model, TOKENIZER)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return {"run": write_run(home / "demo", {3: model}, TOKENIZER), "hf": folder}


def greedy(model, ids, count):
    stops = {TOKENIZER.eos_id, TOKENIZER.special_tokens["<|eot_id|>"]}
    return TOKENIZER.decode(generate(model, [ids], count, temperature=0, top_p=1, seed=0, stop_ids=stops)[0])


def continued(model, prompt, count):
    return greedy(model, [TOKENIZER.bos_id, *TOKENIZER.encode(prompt)], count)


def test_prompts_are_continued_in_their_order(places, model, capsys):
    prompts = ["def main():", "a much longer prompt than the first\n", "é"]
    assert printed(capsys, main, places["run"], *prompts, "--temperature", "0", "--max-tokens",
                   "30") == "".join(f"{prompt}{continued(model, prompt, 30)}\n" for prompt in prompts)


def test_a_model_of_the_hub_is_downloaded_when_it_is_named(places, model, capsys, hub):  # noqa: F811
    hub.push("someone/small", places["hf"])
    for off in (False, True):
        hub.off = off
        assert printed(capsys, main, "someone/small", "a", "--temperature", "0", "--max-tokens",
                       "9") == f"a{continued(model, 'a', 9)}\n"
    assert "no such model" in printed(capsys, main, "someone/other", "a", expect=2) or hub.off


def test_the_settings_reach_the_model(places, model, capsys):
    def output(*arguments):
        assert main([str(places["run"]), "x", "--max-tokens", "20", *arguments]) == 0
        return capsys.readouterr().out
    assert output("--seed", "1") == output("--seed", "1") != output("--seed", "2")
    text = continued(model, "x", 20)
    for one in ("--top-k=1", "--min-p=1", "--top-p=0.0001"):
        assert output("--temperature", "2", one) == f"x{text}\n"
    assert output("--temperature", "0", "--stop", text[4:6]) == f"x{text[:text.find(text[4:6])]}\n"
    assert output("--temperature", "0", "--repetition-penalty", "5") != f"x{text}\n"


@pytest.mark.parametrize(("weight", "temperature"), [(float("nan"), "0"), (3e38, "1")])
def test_a_model_that_gives_no_numbers_is_named(tmp_path, capsys, weight, temperature):
    broken = for_tokenizer(TOKENIZER, context_length=16)
    broken.norm.weight.data.fill_(weight)
    run = write_run(tmp_path / "run", {3: broken}, TOKENIZER)
    assert "No text can be written with" in printed(capsys, main, run, "x", "--temperature", temperature,
                                                    expect=2)


@pytest.mark.parametrize(("arguments", "output"), [
    ([], "nothing to continue"), (["x" * 256], "257 tokens, which leaves no room in the model's context of 256"),
    (["x", "--top-p", "0", "--min-p", "3"], "top_p must be above 0 and at most 1, not 0.0. min_p must be"),
    (["x", "--stop", ""], "stop must be"),
    (["x", "--device", "nothing"], "--device nothing cannot be used here"), (["x", "--chat"], "has no chat template")])
def test_what_cannot_be_done_is_said_in_a_sentence(places, arguments, output, capsys):
    assert main([str(places["run"]), *arguments]) == 2
    captured = capsys.readouterr()
    assert output in captured.err and captured.out == ""


@pytest.fixture
def typed(monkeypatch):
    """Lines that a user types, one after the other; an exception among them is raised."""
    def type_(*lines):
        left = [*lines, EOFError]

        def answer(prompt=""):
            if isinstance(line := left.pop(0), str):
                return line
            raise line
        monkeypatch.setattr(builtins, "input", answer)
    return type_


SESSION = ("--interactive", "--temperature", "0", "--max-tokens", "25")


def test_a_session_asks_until_there_is_no_more(places, model, typed, capsys, monkeypatch):
    """Ctrl-C at the prompt asks again; in a reply, here the second one, it ends that alone."""
    from drover.model.generation.stream import stream
    replies = iter([None, 4, None])

    def interrupted(*arguments):
        last = next(replies)
        for number, piece in enumerate(stream(*arguments)):
            if number == last:
                raise KeyboardInterrupt
            yield piece
    monkeypatch.setattr("drover.model.generation.stream.stream", interrupted)
    typed("one", "  ", KeyboardInterrupt, "x" * 256, "two", "three", "exit", "four")
    assert main([str(places["run"]), *SESSION]) == 0
    captured = capsys.readouterr()
    one, two, three = (f"{prompt}{continued(model, prompt, 25)}" for prompt in ("one", "two", "three"))
    first, second, third = re.split(r"\n(?=two|three)", captured.out)
    assert (first, third) == (f"{one}\n", f"{three}\n") and "leaves no room" in captured.err
    assert "step-00000003 takes a prompt a line; Ctrl-C ends a reply; Ctrl-D, or exit, ends the session" in captured.err
    assert captured.err.count("Ctrl-D") == 2, "at the start, and after Ctrl-C at the prompt"
    assert two.startswith(second) and len("two") < len(second) < len(two)


def ids_of(messages):
    """The ids of a conversation, by hand."""
    special = TOKENIZER.special_tokens
    ids = [special[BOS]]
    for role, content in [*messages, ("assistant", None)]:
        ids += [special["<|start_header_id|>"], *role.encode(), special["<|end_header_id|>"], *b"\n\n"]
        ids += [*content.encode(), special["<|eot_id|>"]] if content is not None else []
    return ids


def test_a_conversation_is_written_by_its_template_and_remembered(places, model, typed, capsys):
    typed("Hello é", "And then?", "/new", "Hello é")
    assert main([str(places["hf"]), *CHAT, "--interactive", "--system", "Be brief."]) == 0
    first = greedy(model, ids_of(history := [("system", "Be brief."), ("user", "Hello é")]), 12)
    second = greedy(model, ids_of([*history, ("assistant", first), ("user", "And then?")]), 12)
    assert capsys.readouterr().out == f"{first}\n{second}\n{first}\n"


def test_what_controls_a_terminal_is_not_sent_to_one(capsys, monkeypatch):
    chat.show("a\x1b[31mb\n")
    assert capsys.readouterr().out == "a\x1b[31mb\n"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    chat.show("a\x1b[31m\x9bb\tc\n")
    assert capsys.readouterr().out == "a\ufffd[31m\ufffdb\tc\n"


def test_code_beside_a_tokenizer_is_not_run(places, tmp_path):
    folder = shutil.copytree(places["hf"], tmp_path / "coded")
    settings = folder / "tokenizer_config.json"
    write_json(settings, {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}})
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\nclass Evil: ...\n")
    refused(UserError, "needs its own Python code, which Drover does not run", ChatTemplate, folder)
    assert not (tmp_path / "executed").exists()
