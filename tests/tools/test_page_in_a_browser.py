"""The page of tools.serve as a browser shows it: texts, and conversations where the tokenizer has a chat template."""

import json

import pytest

from tests.browser import Browser, needs_browser
from tests.tiny_models import TOKENIZER_OF_BYTES, for_tokenizer, write_huggingface, write_run
from tests.tools.test_chat import TEMPLATE
from tests.tools.test_serve import SAMPLES, append_line, served
from tests.tools.test_serve import pytestmark as needs_server

pytestmark = [needs_server, needs_browser]
READY = "document.title !== 'Drover' && document.title !== ''"


@pytest.fixture(scope="module")
def model():
    return for_tokenizer(TOKENIZER_OF_BYTES, context_length=256)


@pytest.fixture
def browser(tmp_path):
    opened = Browser(tmp_path)
    try:
        yield opened
    finally:
        opened.close()
    assert opened.errors == []


def give(browser, text, **settings):
    """Write into the page, and wait for the end of the answer."""
    for name, value in {"prompt": text, **settings}.items():
        browser.run(f"void (document.getElementById({json.dumps(name)}).value = {json.dumps(value)})")
    browser.run("document.getElementById('go').click()")
    browser.wait("document.getElementById('halt').disabled")


def shown(browser, name):
    return browser.run(f"document.getElementById('{name}').textContent")


def test_a_conversation_is_held_with_all_that_was_said(browser, model, tmp_path):
    folder = write_huggingface(tmp_path / "chatty", model, TOKENIZER_OF_BYTES)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with served(folder) as port:
        browser.open(f"http://127.0.0.1:{port}/", READY)
        browser.run("void (window.sent = [], window.plain = fetch, window.fetch = (place, what) => "
                    "(what && sent.push([place, JSON.parse(what.body)]), plain(place, what)))")
        give(browser, "Hello", system="Be brief.", max_tokens=12, temperature=0)
        give(browser, "And then?")
        sent = browser.run("sent")
        first = sent[1][1]["messages"][2]["content"]
        assert [place for place, _ in sent] == ["/v1/chat/completions"] * 2 and first
        assert sent[1][1]["messages"] == [
            {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": first}, {"role": "user", "content": "And then?"}]
        assert shown(browser, "output").startswith(f"Hello\n\n{first}\n\nAnd then?\n\n")
        assert "tokens" in shown(browser, "status") and shown(browser, "go") == "Send"
        browser.run("document.getElementById('fresh').click()")
        assert shown(browser, "output") == "" and browser.run("talk.length") == 0


def test_what_was_refused_may_be_sent_again(browser, model, tmp_path):
    folder = write_huggingface(tmp_path / "chatty", model, TOKENIZER_OF_BYTES)
    (folder / "chat_template.jinja").write_text("{{ raise_exception('not this') }}")
    with served(folder) as port:
        browser.open(f"http://127.0.0.1:{port}/", READY)
        give(browser, "Hello")
        assert "not this" in shown(browser, "status") and browser.run("talk.length") == 0
        assert browser.run("document.getElementById('prompt').value") == "Hello" and shown(browser, "output") == ""
        browser.errors = [error for error in browser.errors if "400" not in error]  # it logs every refusal


def test_a_run_without_a_template_continues_texts_and_shows_its_samples(browser, model, tmp_path):
    run = write_run(tmp_path / "demo", {3: model}, TOKENIZER_OF_BYTES)
    for sample in SAMPLES:
        append_line(run / "train/samples.jsonl", sample)
    with served(run) as port:
        browser.open(f"http://127.0.0.1:{port}/", f"{READY} && !document.getElementById('beside').hidden")
        assert browser.run("document.getElementById('mode').hidden") is True
        assert browser.run("document.getElementById('prompt').value") == "def "
        give(browser, "x <b>", max_tokens=5, temperature=0)
        assert shown(browser, "output").startswith("x <b>") and shown(browser, "go") == "Write"
        assert shown(browser, "samples").count("use prompt") == 2
