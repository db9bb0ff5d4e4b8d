"""The server, over real sockets: OpenAI's forms, requests that are written together, places that are bounded and come
free again."""

import codecs
import http.client
import importlib.util
import json
import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import pytest
import torch

from model.generate import generate
from pipeline.evaluation.open_model import open_model
from pipeline.evaluation.prompts import chat_template, ending_ids, readable_bytes
from pipeline.files import append_line
from pipeline.tokenization.simple import ByteTokenizer
from tests.tiny_models import for_tokenizer, write_huggingface, write_run
from tests.tools.test_chat import TEMPLATE, spelled
from tests.waiting import wait_for
from tools import serve
from tools.serving.asked import Reader
from tools.serving.worker import Worker

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("starlette", "uvicorn")),
    reason="the packages starlette and uvicorn are not installed: pip install -e '.[serve]'")

TOKENIZER = ByteTokenizer()
CONTEXT = 300_000
"""Long enough that a text of all of it does not end while a test runs."""
BATCH, QUEUE = 2, 3
SAMPLES = [{"step": 6, "prompt": "def ", "text": "x <b>"}, {"step": 12, "prompt": "def ", "text": "y"}]


@pytest.fixture(scope="module")
def model():
    endless = for_tokenizer(TOKENIZER, context_length=CONTEXT, dim=24, heads=2, kv_heads=1, layers=1)
    endless.output.weight[256:] = 0  # hardly ever the likeliest
    return endless


@contextmanager
def served(path):
    """A running server's port."""
    import uvicorn

    from tools.serving.app import Server
    opened = open_model(path, torch.device("cpu"), torch.float32)
    worker = Worker(opened.model, readable_bytes(opened), batch=BATCH, queue=QUEUE)
    app = Server(Reader(opened, path.name, ending_ids(opened), chat_template(opened)), worker, ["127.0.0.1"]).app
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture(scope="module")
def run_port(model, tmp_path_factory):
    """A run's server."""
    run = write_run(tmp_path_factory.mktemp("served") / "demo", {3: model}, TOKENIZER)
    for sample in SAMPLES:
        append_line(run / "train/samples.jsonl", sample)
    with served(run) as port:
        yield port


def send(port, method, path, body=None, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", port)
    content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    connection.request(method, path, content, {"Content-Type": "application/json", **headers})
    return connection, connection.getresponse()


def ask(port, path, body=None, expect=200, **headers):
    """The JSON of an answer."""
    connection, response = send(port, "GET" if body is None else "POST", path, body, **headers)
    with closing(connection):
        content = response.read()
        assert response.status == expect, content
        return json.loads(content)


def complete(port, expect=200, **body):
    return ask(port, "/v1/completions", body, expect)


def events(port, path="/v1/completions", **body):
    connection, response = send(port, "POST", path, {**body, "stream": True})
    with closing(connection):
        assert response.status == 200 and response.getheader("Content-Type").startswith("text/event-stream")
        parts = response.read().decode().split("\n\n")
    assert parts.pop() == "" and parts.pop() == "data: [DONE]"
    return [json.loads(part.removeprefix("data: ")) for part in parts]


def greedy(model, ids, count):
    return TOKENIZER.decode(generate(model, [ids], count, temperature=0, top_p=1, seed=0, stop_ids=())[0])


def continued(model, prompt, count):
    return greedy(model, [TOKENIZER.bos_id, *prompt.encode()], count)


def idle(port):
    return ask(port, "/health") | {"model": ""} == {"status": "ok", "model": "", "running": 0, "waiting": 0}


def test_it_says_what_it_has(run_port):
    [found] = ask(run_port, "/v1/models")["data"]
    assert (found["id"], found["object"], found["context_length"]) == ("demo", "model", CONTEXT)
    assert found["chat"] is False
    assert ask(run_port, "/health") == {"status": "ok", "model": "demo", "running": 0, "waiting": 0}
    assert ask(run_port, "/samples") == SAMPLES


def test_a_completion_is_what_the_model_writes(run_port, model):
    found = complete(run_port, model="demo", prompt="def é", max_tokens=24, temperature=0)
    [choice] = found["choices"]
    assert choice == {"index": 0, "logprobs": None, "finish_reason": "length", "text": continued(model, "def é", 24)}
    assert found["object"] == "text_completion" and found["model"] == "demo"
    assert found["usage"] == {"prompt_tokens": 7, "completion_tokens": 24, "total_tokens": 31}
    assert complete(run_port, prompt="def é", temperature=0)["choices"][0]["text"] == continued(model, "def é", 16)


def test_a_stream_is_the_same_text_in_pieces(run_port, model):
    body = {"prompt": ["one", "two"], "max_tokens": 20, "temperature": 0, "echo": True,
            "stream_options": {"include_usage": True}}
    parts = events(run_port, **body)
    assert parts.pop()["usage"] == {"prompt_tokens": 8, "completion_tokens": 40, "total_tokens": 48}
    texts, ends = ["", ""], [None, None]
    for part in parts:
        [choice] = part["choices"]
        texts[choice["index"]] += choice["text"]
        ends[choice["index"]] = choice["finish_reason"]
    expected = [f"{prompt}{continued(model, prompt, 20)}" for prompt in ("one", "two")]
    assert texts == expected and ends == ["length"] * 2 and len(parts) > 10
    del body["stream_options"]
    assert [choice["text"] for choice in complete(run_port, **body)["choices"]] == expected


def names_of(ids):
    """How the server writes ids, worked out anew."""
    contents = [TOKENIZER.token_bytes(token) for token in ids]
    special = {token: name for name, token in TOKENIZER.special_tokens.items()}
    return [content.decode() if content.isascii() and content else special[token] if not content else
            f"bytes:\\x{content.hex()}" for token, content in zip(ids, contents, strict=True)]


def by_one_pass(model, prompt, text, count):
    """The four lists of a greedy text after a prompt, echo and all, from one forward pass over both."""
    ids = [TOKENIZER.bos_id, *TOKENIZER.encode(prompt)]
    ids += generate(model, [ids], count, temperature=0, top_p=1, seed=0, stop_ids=())[0]
    logprobs = model(torch.tensor([ids]))[0].log_softmax(-1)
    before = [b"".join(map(TOKENIZER.token_bytes, ids[:place])) for place in range(len(ids))]
    offsets = [len(codecs.getincrementaldecoder("utf-8")("replace").decode(content)) for content in before]
    assert TOKENIZER.decode(ids) == prompt + text
    return ids, logprobs, offsets


def same_lists(told, ids, logprobs, offsets, first, most):
    """The lists of the tokens from `first` on, to 1e-5."""
    assert told["tokens"] == names_of(ids[first:]) and told["text_offset"] == offsets[first:]
    for place, own, top in zip(range(first, len(ids)), told["token_logprobs"], told["top_logprobs"], strict=True):
        if place == 0:
            assert own is top is None
            continue
        found = logprobs[place - 1]
        assert own == pytest.approx(float(found[ids[place]]), abs=1e-5)
        best = found.topk(most)
        wanted = dict(zip(names_of([*best.indices.tolist(), ids[place]]),
                          [*best.values.tolist(), float(found[ids[place]])], strict=True))
        assert top == pytest.approx(wanted, abs=1e-5) and len(top) == len({*best.indices.tolist(), ids[place]})


SETTINGS = {"prompt": "def é", "max_tokens": 24, "temperature": 0}


@pytest.mark.parametrize("most", [0, 3, 5])
@pytest.mark.parametrize("echo", [False, True])
def test_log_probabilities_are_those_of_one_forward_pass(run_port, model, most, echo):
    [choice] = complete(run_port, **SETTINGS, logprobs=most, echo=echo)["choices"]
    text = continued(model, "def é", 24)
    assert choice["text"] == ("def é" if echo else "") + text
    ids, logprobs, offsets = by_one_pass(model, "def é", text, 24)
    if not echo:
        offsets = [place - len("def é") for place in offsets]
    same_lists(choice["logprobs"], ids, logprobs, offsets, 0 if echo else 7, most)


def test_settings_do_not_change_what_is_told_of_a_token(run_port, model):
    """Drawn hot and from few tokens with a penalty, its probabilities are still the model's own."""
    [choice] = complete(run_port, prompt="x", max_tokens=30, temperature=1.5, top_k=5, repetition_penalty=1.3, seed=3,
                        logprobs=2)["choices"]
    told = choice["logprobs"]
    ids = [TOKENIZER.bos_id, *b"x"]
    for name, own in zip(told["tokens"], told["token_logprobs"], strict=True):
        logprobs = model(torch.tensor([ids]))[0, -1].log_softmax(-1)
        ids.append(int(name[8:], 16) if name.startswith("bytes:") else ord(name))
        assert own == pytest.approx(float(logprobs[ids[-1]]), abs=1e-5)
    assert TOKENIZER.decode(ids) == "x" + choice["text"] and len(told["tokens"]) == 30


@pytest.mark.parametrize("stop", [None, 3])
def test_streamed_pieces_tell_of_the_same_tokens(run_port, model, stop):
    """Also where a stop string holds tokens back: those that belong to it alone are not told of."""
    body = {**SETTINGS, "echo": True, "logprobs": 2}
    if stop:
        text = continued(model, "def é", 24)
        body["stop"] = text[stop:stop + 2]
        assert text.find(body["stop"]) == stop
    [whole] = complete(run_port, **body)["choices"]
    parts = [part["choices"][0] for part in events(run_port, **body)]
    told = [part["logprobs"] for part in parts]
    assert {key: [value for part in told for value in part[key]] for key in whole["logprobs"]} == whole["logprobs"]
    assert "".join(part["text"] for part in parts) == whole["text"] and len(parts) > (1 if stop else 5)
    _, _, offsets = by_one_pass(model, "def é", continued(model, "def é", 24), 24)
    assert whole["logprobs"]["text_offset"] == [place for place in offsets if place < len(whole["text"])]
    assert bool(stop) == (len(whole["logprobs"]["tokens"]) < 31)


def test_choices_are_told_of_apart_and_who_does_not_ask_is_not_told(run_port):
    bodies = [{"prompt": ["one", "two"], "n": 2, "seed": 1, "logprobs": 1}, {"prompt": "three", "temperature": 0}]
    with ThreadPoolExecutor(2) as pool:
        told, plain = pool.map(lambda body: complete(run_port, **body, max_tokens=12)["choices"], bodies)
    assert [choice["logprobs"] for choice in plain] == [None]
    assert all(len(choice["logprobs"]["tokens"]) == 12 for choice in told) and len(told) == 4
    assert len({tuple(choice["logprobs"]["tokens"]) for choice in told}) == 4


def test_ids_stops_seeds_and_several_choices(run_port, model):
    ids = [TOKENIZER.bos_id, *b"abc"]
    text = continued(model, "abc", 20)
    assert complete(run_port, prompt=ids, max_tokens=20, temperature=0)["choices"][0]["text"] == text
    stop = text[5:7]
    [choice] = complete(run_port, prompt=[ids], max_tokens=20, temperature=0, stop=[stop, "never"])["choices"]
    assert (choice["text"], choice["finish_reason"]) == (text[:text.find(stop)], "stop")

    def drawn(**body):
        return [choice["text"] for choice in complete(run_port, prompt="x", max_tokens=12, n=3, **body)["choices"]]
    assert drawn(seed=4) == drawn(seed=4) != drawn(seed=5) and len(set(drawn(seed=4))) == 3
    assert drawn() != drawn()
    assert drawn(seed=4)[1] == drawn(seed=5)[0]
    assert set(drawn(seed=4, top_k=1)) == {continued(model, "x", 12)}


@pytest.mark.parametrize(("body", "said", "status"), [
    (b"{", "no JSON", 400), (b"[1]", "JSON object", 400), ({}, "prompt is missing", 400),
    ({"prompt": "x", "model": "gpt-4"}, "The model 'gpt-4' is not here; this server has 'demo'", 404),
    ({"prompt": "x", "top_p": 0, "min_p": 2}, "top_p must be above 0 and at most 1, not 0.0. min_p must be", 400),
    ({"prompt": "x", "max_tokens": "9", "n": 1.5}, "max_tokens: Input should be a valid integer. n: Input", 400),
    ({"prompt": "x", "max_tokens": 0}, "max_tokens must be at least 1", 400),
    ({"prompt": "x", "logprobs": 6}, "logprobs must be from 0 to 5, not 6", 400),
    ({"prompt": "x", "logprobs": True}, "logprobs: Input should be a valid integer", 400),
    ({"prompt": "x", "suffix": "y"}, "suffix is not supported", 400),
    ({"prompt": "x", "presence_penalty": 1.0}, "presence_penalty is not supported: take repetition_penalty", 400),
    ({"prompt": "x", "best_of": 2}, "best_of is not supported", 400),
    ({"prompt": "x", "temprature": 1}, "temprature is not known here", 400),
    ({"prompt": "x", "n": 6}, "asks for 6 texts; this server takes 5 at once", 400),
    ({"prompt": "x", "stop": [1]}, "stop must be", 400), ({"prompt": {}}, "prompt must be", 400),
    ({"prompt": []}, "prompt must be", 400), ({"prompt": [512]}, r"outside 0 .. 511", 400),
    ({"prompt": "x", "max_tokens": CONTEXT}, f"exceeds the model's context of {CONTEXT}", 400)])
def test_what_cannot_be_asked_is_an_error_in_openais_form(run_port, body, said, status):
    error = ask(run_port, "/v1/completions", body, expect=status)["error"]
    assert said in error["message"] and error["type"] == "invalid_request_error"
    assert set(error) == {"message", "type", "param", "code"}


def test_places_that_are_not_there_are_errors_too(run_port):
    assert "There are GET /v1/models" in ask(run_port, "/v1/engines", expect=404)["error"]["message"]
    assert "GET /v1/completions" in ask(run_port, "/v1/completions", expect=405)["error"]["message"]
    ask(run_port, "/v1/chat/completions", {"messages": []}, expect=404)  # no chat template
    connection, response = send(run_port, "GET", "/health", Host="elsewhere.example")
    with closing(connection):
        assert response.status == 400  # a page from elsewhere that was made to look like this machine's


def endless(port, texts=1, stream=True):
    """A request that does not end by itself."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("POST", "/v1/completions", json.dumps({
        "prompt": "x", "max_tokens": CONTEXT - 10, "temperature": 0, "n": texts, "stream": stream}))
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_a_full_queue_refuses_and_clients_that_go_away_free_their_places(run_port, stream):
    waiting = [endless(run_port, 2, stream), endless(run_port, 3, stream)]
    try:
        wait_for(lambda: ask(run_port, "/health") | {"model": ""} == {
            "status": "ok", "model": "", "running": BATCH, "waiting": QUEUE})
        connection, response = send(run_port, "POST", "/v1/completions", {"prompt": "x"})
        with closing(connection):
            assert response.status == 429 and int(response.getheader("Retry-After")) >= 1
            assert json.loads(response.read())["error"]["code"] == "queue_full"
        waiting.pop().close()
        wait_for(lambda: ask(run_port, "/health")["running"] + ask(run_port, "/health")["waiting"] <= 3)
    finally:
        for connection in waiting:
            connection.close()
    wait_for(lambda: idle(run_port))


def test_requests_are_written_together_and_each_gets_its_own(run_port, model):
    prompts = ["one", "a longer one", "x", "the fourth"]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda prompt: complete(run_port, prompt=prompt, max_tokens=60, temperature=0), prompts))
    assert [answer["choices"][0]["text"] for answer in found] == [continued(model, each, 60) for each in prompts]


def test_a_model_that_fails_is_said_and_the_server_goes_on(run_port, model, monkeypatch, capfd):
    from model.generation.writer import Writer
    whole = Writer.step
    monkeypatch.setattr(Writer, "step", lambda self: 1 / 0)
    error = complete(run_port, prompt="x", expect=500)["error"]
    assert "ZeroDivisionError" in error["message"] and error["type"] == "server_error"
    [part] = events_of_failure(run_port)
    assert part["error"]["type"] == "server_error"
    monkeypatch.setattr(Writer, "step", whole)
    assert complete(run_port, prompt="x", temperature=0)["choices"][0]["text"] == continued(model, "x", 16)
    assert "ZeroDivisionError" in capfd.readouterr().err


def events_of_failure(port):
    connection, response = send(port, "POST", "/v1/completions", {"prompt": "x", "stream": True})
    with closing(connection):
        return [json.loads(part.removeprefix("data: ")) for part in response.read().decode().split("\n\n") if part]


def test_the_page_asks_for_nothing_from_elsewhere(run_port):
    connection, response = send(run_port, "GET", "/")
    with closing(connection):
        page = response.read().decode()
    assert response.status == 200 and "default-src 'none'" in response.getheader("Content-Security-Policy")
    assert not re.search(r"https?://|//[a-z]|@import|src=", page)
    assert set(re.findall(r"fetch\(\"(.*?)\"", page)) == {"/v1/completions", "/v1/chat/completions", "/v1/models",
                                                            "/samples"}
    assert "innerHTML" not in page and "prefers-color-scheme: dark" in page
    for control in ("prompt", "go", "halt", "output", "samples"):
        assert f'id="{control}"' in page


def test_chats_go_through_the_template(model, tmp_path):
    folder = write_huggingface(tmp_path / "chatty", model, TOKENIZER)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello é"}]
    with served(folder) as port:
        assert ask(port, "/v1/models")["data"][0]["chat"] is True
        body = {"messages": messages, "max_tokens": 20, "temperature": 0}
        found = ask(port, "/v1/chat/completions", body)
        text = greedy(model, spelled([("system", "Be brief."), ("user", "Hello é")]), 20)
        assert found["object"] == "chat.completion" and found["choices"] == [
            {"index": 0, "logprobs": None, "finish_reason": "length",
             "message": {"role": "assistant", "content": text}}]
        parts = events(port, "/v1/chat/completions", **body)
        assert "".join(part["choices"][0]["delta"]["content"] for part in parts) == text
        assert parts[0]["choices"][0]["delta"]["role"] == "assistant"
        assert {part["object"] for part in parts} == {"chat.completion.chunk"}
        for wrong in ([], "x", [{"role": "user"}], [{"role": "user", "content": [1]}]):
            assert "messages must be" in ask(port, "/v1/chat/completions", {"messages": wrong}, 400)["error"]["message"]
        assert ask(port, "/samples") == []


@pytest.mark.parametrize(("arguments", "said"), [
    (["--batch", "0"], "--batch must be at least 1"), (["--port", "70000"], "cannot be listened on"),
    (["--host", "203.0.113.7"], "cannot be listened on"), ([], "is no folder")])
def test_what_cannot_be_served_is_said_in_a_sentence(arguments, said, capsys, tmp_path):
    assert serve.main(["--model", str(tmp_path / "none"), "--port", "0", *arguments]) == 2
    assert said in capsys.readouterr().err
