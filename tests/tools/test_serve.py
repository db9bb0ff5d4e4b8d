"""The server, over real sockets: OpenAI's forms, requests that are written together, places that are bounded and come
free again."""

import copy
import http.client
import importlib.util
import json
import re
import shlex
import socket
import threading
from contextlib import closing, contextmanager

import pytest
import torch

from drover.model.generate import generate
from drover.pipeline.core.files import append_line
from drover.pipeline.evaluation.open_model import open_model
from drover.pipeline.evaluation.prompts import chat_template, ending_ids, readable_bytes
from drover.pipeline.tokenization.simple import ByteTokenizer
from drover.tools import serve
from drover.tools.serving.asked import Reader
from drover.tools.serving.worker import Worker
from tests.refusal import printed, table
from tests.tiny_models import for_tokenizer, write_huggingface, write_run
from tests.tools.test_chat import TEMPLATE, continued, greedy, spelled
from tests.waiting import wait_for

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
def served(path, key=None):
    """A running server's port."""
    import uvicorn

    from drover.tools.serving.app import Server
    opened = open_model(path, torch.device("cpu"), torch.float32)
    worker = Worker(opened.model, readable_bytes(opened.tokenizer), batch=BATCH, queue=QUEUE)
    reader = Reader(opened, path.name, ending_ids(opened), chat_template(opened))
    app = Server(reader, worker, frozenset(["localhost", "our.example"]), key).app
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
    """A response, and its bytes."""
    content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    with closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
        connection.request(method, path, content, {"Content-Type": "application/json", **headers})
        response = connection.getresponse()
        return response, response.read()


def ask(port, path, body=None, expect=200, **headers):
    """The JSON of an answer."""
    response, content = send(port, "GET" if body is None else "POST", path, body, **headers)
    assert response.status == expect, content
    return json.loads(content)


def complete(port, expect=200, **body):
    return ask(port, "/v1/completions", body, expect)


def events(port, path="/v1/completions", **body):
    response, content = send(port, "POST", path, {**body, "stream": True})
    assert response.status == 200 and response.getheader("Content-Type").startswith("text/event-stream")
    parts = content.decode().split("\n\n")
    assert parts.pop() == "" and parts.pop() == "data: [DONE]"
    return [json.loads(part.removeprefix("data: ")) for part in parts]


def test_it_says_what_it_has_and_a_completion_is_what_the_model_writes(run_port, model):
    [found] = ask(run_port, "/v1/models")["data"]
    assert found == {**found, "id": "demo", "object": "model", "context_length": CONTEXT, "chat": False}
    assert ask(run_port, "/health") == {"status": "ok", "model": "demo", "running": 0, "waiting": 0}
    assert ask(run_port, "/samples") == SAMPLES
    found = complete(run_port, model="demo", prompt="def é", temperature=0)
    assert found == {**found, "object": "text_completion", "model": "demo", "choices": [
        {"index": 0, "logprobs": None, "finish_reason": "length", "text": continued(model, "def é", 16)}],
        "usage": {"prompt_tokens": 7, "completion_tokens": 16, "total_tokens": 23}}


def name_of(token):
    """How the server writes an id, worked out again."""
    content = TOKENIZER.token_bytes(token)
    if not content:
        return next(name for name, special in TOKENIZER.special_tokens.items() if special == token)
    return content.decode() if content.isascii() else f"bytes:\\x{content.hex()}"


def test_log_probabilities_are_those_of_one_forward_pass_also_where_a_prompt_is_only_scored(run_port, model):
    """That they are the model's own, however a token is drawn, is tested with the model."""
    prompt, body = [TOKENIZER.bos_id, *"def é".encode()], {"prompt": ["x", "def é"], "temperature": 0, "logprobs": 3}
    ids = prompt + generate(model, [prompt], 24, temperature=0, top_p=1, seed=0, stop_ids=())[0]
    echoed, bare, scored = (complete(run_port, **body, **more) for more in (
        {"max_tokens": 24, "echo": True}, {"max_tokens": 24}, {"max_tokens": 0, "echo": True}))
    told, rows = echoed["choices"][1]["logprobs"], model(torch.tensor([ids]))[0].log_softmax(-1)
    assert told["tokens"] == list(map(name_of, ids))
    assert told["token_logprobs"][0] is told["top_logprobs"][0] is None
    for row, token, own, top in zip(rows, ids[1:], told["token_logprobs"][1:], told["top_logprobs"][1:], strict=False):
        assert own == pytest.approx(float(row[token]), abs=1e-5)
        best = row.topk(3).indices.tolist()
        assert top == pytest.approx({name_of(one): float(row[one]) for one in (*best, token)}, abs=1e-5)
    for answer, part in ((echoed, slice(None)), (bare, slice(len(prompt), None)), (scored, slice(len(prompt)))):
        choice = answer["choices"][1]
        assert (choice["text"], choice["finish_reason"]) == (TOKENIZER.decode(ids[part]), "length")
        assert choice["logprobs"]["tokens"] == told["tokens"][part] and choice["logprobs"]["text_offset"][0] == 0
        found, expected = ([one or 0 for one in own["token_logprobs"]] for own in (choice["logprobs"], told))
        assert found == pytest.approx(expected[part], abs=1e-5)
    assert scored["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("stop", [False, True])
def test_a_stream_is_the_same_texts_in_pieces_that_tell_of_the_same_tokens(run_port, model, stop):
    """Also where a stop string holds tokens back: those that belong to it alone are not told of."""
    prompts = ["one", "def é"][stop:]  # where others end at another time, sums are rounded otherwise
    body = {"prompt": prompts, "max_tokens": 24, "temperature": 0, "echo": True, "logprobs": 2}
    unstopped = complete(run_port, **body)["choices"]
    if stop:
        body["stop"] = continued(model, prompts[-1], 24)[3:5]
    found, parts = complete(run_port, **body), events(run_port, **body, stream_options={"include_usage": True})
    assert parts.pop()["usage"] == found["usage"] and len(parts) > (1 if stop else 10)
    for whole, full in zip(found["choices"], unstopped, strict=True):
        pieces = [choice for part in parts for choice in part["choices"] if choice["index"] == whole["index"]]
        assert "".join(piece["text"] for piece in pieces) == whole["text"]
        assert pieces[-1]["finish_reason"] == whole["finish_reason"]
        shown = sum(offset < len(whole["text"]) for offset in full["logprobs"]["text_offset"])
        for key, values in full["logprobs"].items():
            assert whole["logprobs"][key] == values[:shown]
            assert [value for piece in pieces for value in piece["logprobs"][key]] == values[:shown]
    assert (shown < 31) == stop


def test_ids_stops_seeds_and_several_choices(run_port, model):
    text = continued(model, "abc", 20)
    [choice] = complete(run_port, prompt=[TOKENIZER.bos_id, *b"abc"], max_tokens=20, temperature=0,
                        stop=[text[5:7], "never"])["choices"]
    assert (choice["text"], choice["finish_reason"]) == (text[:text.find(text[5:7])], "stop")

    def drawn(**body):
        return [choice["text"] for choice in complete(run_port, prompt="x", max_tokens=12, n=3, **body)["choices"]]
    assert drawn(seed=4) == drawn(seed=4) and len(set(drawn(seed=4))) == 3 and drawn() != drawn()
    assert drawn(seed=4)[1:] == drawn(seed=5)[:2]
    assert set(drawn(seed=4, top_k=1)) == {continued(model, "x", 12)}


@pytest.mark.parametrize(("body", "status", "said"), [
    (b"[" * 100_000, 400, "nested too deeply"), (b" " * (2**24 + 1), 413, "larger than 16777216 bytes"),
    ({"prompt": "x", "stop": ["x"] * 200_000}, 400, "stop: Value should have at most 16 items"),
    ({"prompt": "x", "stop": "x" * 257}, 400, "stop.0: String should have at most 256 characters"),
    ({"prompt": "x" * (32 * CONTEXT + 10_001)}, 400, "prompt has a text of more than 9610000 characters"),
    (b"{", 400, "is not JSON"), *table("""
    {"prompt": "x", "max_tokens": 300000} -> 400 -> exceeds the model's context of 300000
    [1] -> 400 -> JSON object
    {} -> 400 -> prompt is missing
    {"prompt": "x", "model": "gpt-4"} -> 404 -> The model 'gpt-4' is not here; this server has 'demo'
    {"prompt": "x", "top_p": 0, "min_p": 2} -> 400 -> top_p must be above 0 and at most 1, not 0.0. min_p must be
    {"prompt": "x", "max_tokens": "9", "logprobs": 6} -> 400 -> max_tokens: Input should be a valid integer. logprobs
    {"prompt": "x", "presence_penalty": 1.0} -> 400 -> presence_penalty is not supported: take repetition_penalty
    {"prompt": "x", "temprature": 1} -> 400 -> temprature is not a known field
    {"prompt": "x", "n": 6} -> 400 -> asks for 6 texts; this server takes 5 at once
    {"prompt": ["x", []]} -> 400 -> at least 1 item
    {"prompt": [512]} -> 400 -> outside 0 .. 511
    {"prompt": ["x", [-1]]} -> 400 -> outside 0 .. 511
    {"prompt": "x\\ud800"} -> 400 -> half of a character""", json.loads, int)])
def test_what_cannot_be_asked_is_an_error_in_openais_form(run_port, body, status, said):
    error = ask(run_port, "/v1/completions", body, expect=status)["error"]
    assert said in error["message"] and error["type"] == "invalid_request_error"
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(("path", "body", "status"), table("""
    /v1/engines -> null -> 404
    /v1/completions -> null -> 405
    /v1/chat/completions -> {"messages": []} -> 404""", str, json.loads, int))
def test_places_that_are_not_there_are_errors_too(run_port, path, body, status):
    """As chats are, where there is no template for them."""
    assert "There are GET /v1/models" in ask(run_port, path, body, expect=status)["error"]["message"]


@pytest.mark.parametrize(("headers", "status"), table("""
    {"Host": "elsewhere.example"} -> 400
    {"Host": "["} -> 400
    {"Host": "192.0.2.7:8000"} -> 200
    {"Host": "[::1]:8000"} -> 200
    {"Host": "LOCALHOST"} -> 200
    {"Host": "127.0.0.1:1", "Origin": "http://127.0.0.1:1"} -> 200
    {"Host": "127.0.0.1:1", "Origin": "https://our.example"} -> 200
    {"Origin": "https://elsewhere.example"} -> 403
    {"Origin": "http://[bad"} -> 403
    {"Origin": "null"} -> 403
    {"Host": "127.0.0.1:1", "Origin": "http://localhost:9"} -> 403""", json.loads, int))
def test_only_pages_of_the_server_itself_may_ask_it(run_port, headers, status):
    """Not one whose name was made to point here, nor one in a frame without rights (null); our.example is a proxy."""
    response, content = send(run_port, "GET", "/v1/models", **headers)
    assert response.status == status and ("error" in json.loads(content)) == (status != 200)


def test_with_a_key_only_those_who_bring_it_are_answered(model, tmp_path):
    with served(write_run(tmp_path / "demo", {3: model}, TOKENIZER), key="a long key") as port:
        for path, given in (("/v1/models", {}), ("/samples", {}), ("/v1/completions", {}), ("/nowhere", {}), *(
                ("/v1/models", {"Authorization": wrong}) for wrong in ("Bearer a long kez", "Basic a long key"))):
            assert ask(port, path, expect=401, **given)["error"]["code"] == "invalid_api_key"
        assert ask(port, "/v1/models", Authorization="bearer a long key")["data"]
        assert ask(port, "/health")["status"] == "ok" and send(port, "GET", "/")[0].status == 200


def test_a_key_is_read_from_a_file_or_the_environment(tmp_path, monkeypatch, capsys):
    (tmp_path / "key").write_text("from a file\n")
    monkeypatch.setenv("DROVER_API_KEY", "from the shell")
    assert serve._key(tmp_path / "key") == "from a file" and serve._key(None) == "from the shell"
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "other").write_text("schlüssel", encoding="utf-8")
    for name, said in (("empty", "and is empty"), ("none", "cannot be read"), ("other", "holds no key")):
        assert serve.main(["--model", "x", "--api-key", str(tmp_path / name)]) == 2 and said in capsys.readouterr().err


def test_a_request_whose_scores_are_no_numbers_fails_alone(model, tmp_path):
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken.tok_embeddings.weight[ord("!")] = torch.nan
    with served(write_run(tmp_path / "demo", {3: broken}, TOKENIZER)) as port:
        waiting = endless(port)
        try:
            wait_for(lambda: ask(port, "/health")["running"] == 1)
            assert "logits are NaN" in complete(port, prompt="hey!", expect=500)["error"]["message"]
            assert ask(port, "/health")["running"] == 1
        finally:
            waiting.close()


def endless(port, texts=1, stream=True):
    """A request that does not end by itself."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("POST", "/v1/completions", json.dumps({
        "prompt": "x", "max_tokens": CONTEXT - 10, "temperature": 0, "n": texts, "stream": stream}))
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_a_full_queue_refuses_and_clients_that_go_away_free_their_places(run_port, stream):
    def at_work():
        return [ask(run_port, "/health")[name] for name in ("running", "waiting")]
    waiting = [endless(run_port, 2, stream), endless(run_port, 3, stream)]
    try:
        wait_for(lambda: at_work() == [BATCH, QUEUE])
        response, content = send(run_port, "POST", "/v1/completions", {"prompt": "x"})
        assert response.status == 429 and int(response.getheader("Retry-After")) >= 1
        assert json.loads(content)["error"]["code"] == "queue_full"
        waiting.pop().close()
        wait_for(lambda: sum(at_work()) <= 3)
    finally:
        for connection in waiting:
            connection.close()
    wait_for(lambda: at_work() == [0, 0])


def test_a_model_that_fails_is_said_and_the_server_goes_on(run_port, model, monkeypatch, capfd):
    from drover.model.generation.writer import Writer
    with monkeypatch.context() as patch:
        patch.setattr(Writer, "step", lambda self: 1 / 0)
        error = complete(run_port, prompt="x", expect=500)["error"]
        assert "ZeroDivisionError" in error["message"] and error["type"] == "server_error"
        _, part = send(run_port, "POST", "/v1/completions", {"prompt": "x", "stream": True})
        assert json.loads(part.removeprefix(b"data: "))["error"]["type"] == "server_error"
    assert complete(run_port, prompt="x", temperature=0)["choices"][0]["text"] == continued(model, "x", 16)
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_the_page_asks_for_nothing_from_elsewhere(run_port):
    response, content = send(run_port, "GET", "/")
    page = content.decode()
    assert response.status == 200 and "default-src 'none'" in response.getheader("Content-Security-Policy")
    assert not re.search(r"https?://|//[a-z]|@import|src=|innerHTML", page)
    assert set(re.findall(r"\"(/[a-z0-9/]+)\"", page)) == {"/v1/completions", "/v1/chat/completions", "/v1/models",
                                                           "/samples"}


def test_chats_go_through_the_template(model, tmp_path):
    folder = write_huggingface(tmp_path / "chatty", model, TOKENIZER)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    told, path = {"system": "Be brief.", "user": "Hello é"}, "/v1/chat/completions"
    messages = [{"role": role, "content": content} for role, content in told.items()]
    text, body = greedy(model, spelled(told.items()), 20), {"max_tokens": 20, "temperature": 0, "messages": messages}
    with served(folder) as port:
        assert ask(port, "/v1/models")["data"][0]["chat"] is True and ask(port, "/samples") == []
        found, parts = ask(port, path, body), events(port, path, **body)
        assert ask(port, path, {"messages": [{"role": "user"}]}, 400)["error"]["param"] == "messages.0.content"
    assert found["object"] == "chat.completion" and found["choices"] == [
        {"index": 0, "logprobs": None, "finish_reason": "length", "message": {"role": "assistant", "content": text}}]
    deltas = [part["choices"][0]["delta"] for part in parts]
    assert "".join(delta["content"] for delta in deltas) == text
    assert [delta.get("role") for delta in deltas] == ["assistant", *[None] * (len(deltas) - 1)]
    assert {part["object"] for part in parts} == {"chat.completion.chunk"}


@pytest.mark.parametrize(("arguments", "said"), table("""
    --batch 0 -> --batch must be at least 1
    --port 70000 -> cannot be listened on
    --host 203.0.113.7 -> cannot be listened on
    --batch 1 -> is no folder""", shlex.split))
def test_what_cannot_be_served_is_said_in_a_sentence(arguments, said, capsys, tmp_path):
    assert said in printed(capsys, serve.main, "--model", tmp_path / "none", "--port", "0", *arguments, expect=2)
