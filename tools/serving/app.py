"""The HTTP application: who may use it, its routes, and answers in OpenAI's format."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from drover.model.generation.writer import Piece
from drover.pipeline.core.files import Record, read_lines
from drover.pipeline.evaluation.open_model import run_of
from drover.tools.serving.asked import KEYS, Asked, Reader
from drover.tools.serving.worker import Job, RefusedError, Worker

LOCAL = ("127.0.0.1", "localhost", "::1")
"""Names of this machine for itself."""
OPEN = ("/", "/health")
"""Paths that need no key: the page, which asks the user for it, and the check of a load balancer."""
PAGE = Path(__file__).with_name("page.html")
LARGEST_BODY = 16 * 2**20
"""Limit of a request, in bytes."""
GONE_S = 0.25
"""Seconds between two checks whether the client is still connected."""
SECURITY = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
                                       "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'",
            "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}


class ClientGoneError(Exception):
    """The client has closed the connection."""


class Server:
    """One model behind HTTP.

    Args:
        reader: parses requests.
        worker: generates texts while the application runs.
        hosts, key: see `Door`.
    """

    def __init__(self, reader: Reader, worker: Worker, hosts: frozenset[str], key: str | None = None) -> None:
        self.reader, self.worker, self.started = reader, worker, int(time.time())
        completions = partial(self._answer, read=reader.completion, chat=False)
        routes = [Route("/", self.page), Route("/health", self.health), Route("/samples", self.samples),
                  Route("/v1/models", self.models), Route("/v1/completions", completions, methods=["POST"])]
        if reader.template is not None:
            chats = partial(self._answer, read=reader.chat, chat=True)
            routes.append(Route("/v1/chat/completions", chats, methods=["POST"]))
        self.app = Starlette(routes=routes, lifespan=self._lifespan,
                             middleware=[Middleware(Door, hosts=hosts, key=key)],
                             exception_handlers={RefusedError: _refused, HTTPException: _http_error})

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        running = asyncio.create_task(self.worker.run())
        yield
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running

    async def page(self, request: Request) -> Response:
        """GET /"""
        return HTMLResponse(PAGE.read_text(encoding="utf-8"), headers=SECURITY)

    async def health(self, request: Request) -> Response:
        """GET /health"""
        return JSONResponse({"status": "ok", "model": self.reader.name, "running": len(self.worker.running),
                             "waiting": len(self.worker.waiting)})

    async def samples(self, request: Request) -> Response:
        """GET /samples: sample texts that the run generated while it trained; [] without a run."""
        run = run_of(self.reader.opened.path)
        return JSONResponse(list(read_lines(run.folder / "train/samples.jsonl")) if run is not None else [])

    async def models(self, request: Request) -> Response:
        """GET /v1/models"""
        model = {"id": self.reader.name, "object": "model", "created": self.started, "owned_by": "drover",
                 "context_length": self.reader.opened.config.context_length, "chat": self.reader.template is not None}
        return JSONResponse({"object": "list", "data": [model]})

    async def _answer(self, request: Request, read: Callable[[bytes], Asked], chat: bool) -> Response:
        """POST /v1/completions, or with `chat` /v1/chat/completions"""
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > LARGEST_BODY:
                raise RefusedError(f"The request is larger than {LARGEST_BODY} bytes.", status=413)
        # In a thread: tokenizing a long text takes long, and streams must continue meanwhile.
        asked = await asyncio.to_thread(read, body)
        answer = Answer(request, self.worker, asked, self.reader.name, chat)
        if asked.stream:
            return Stream(answer)
        try:
            return JSONResponse(await answer.whole())
        except ClientGoneError:
            return Response(status_code=499)  # nginx's status for a closed connection; nobody reads it


class Answer:
    """The answer to one request, in OpenAI's format. However it ends, it frees the places of its texts. Raises
    RefusedError at once if the queue is full, and later if the model fails."""

    def __init__(self, request: Request, worker: Worker, asked: Asked, model: str, chat: bool) -> None:
        self._request, self._asked, self._chat = request, asked, chat
        kind = "chat.completion" if chat else "text_completion"
        self._head = {"id": ("chatcmpl-" if chat else "cmpl-") + secrets.token_hex(12), "object": kind,
                      "created": int(time.time()), "model": model}
        self._counts = [0] * len(asked.choices)
        self._job = Job([(choice.prompt, choice.sampling) for choice in asked.choices])
        worker.submit(self._job)
        self.close = lambda: worker.cancel(self._job)

    async def whole(self) -> Record:
        """The answer to a request without `stream`."""
        texts, ends = [""] * len(self._counts), [""] * len(self._counts)
        told = [{key: list[Any]() for key in KEYS} if choice.telling else None for choice in self._asked.choices]
        async for number, piece, lists in self._pieces():
            texts[number] += piece.text
            ends[number] = piece.end or ""
            for key, values in (told[number] or {}).items():
                values += lists[key]
        return {**self._head, "usage": self._usage(), "choices": [
            {"index": number, "logprobs": told[number], "finish_reason": ends[number],
             **({"message": {"role": "assistant", "content": text}} if self._chat else {"text": text})}
            for number, text in enumerate(texts)]}

    async def events(self) -> AsyncIterator[str]:
        """The server-sent events of a stream. An error is its last event, since the status was sent before."""
        head = {**self._head, **({"object": "chat.completion.chunk"} if self._chat else {})}
        begun: set[int] = set()
        try:
            async for number, piece, lists in self._pieces():
                role = {} if number in begun else {"role": "assistant"}
                begun.add(number)
                content = {"delta": {**role, "content": piece.text}} if self._chat else {"text": piece.text}
                yield _event({**head, "choices": [{"index": number, "logprobs": lists, "finish_reason": piece.end,
                                                   **content}]})
            if self._asked.include_usage:
                yield _event({**head, "choices": [], "usage": self._usage()})
            yield "data: [DONE]\n\n"
        except RefusedError as error:
            yield _event(error.body())
        except ClientGoneError:
            return

    def _usage(self) -> dict[str, int]:
        read, written = self._asked.prompt_tokens, sum(self._counts)
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}

    async def _pieces(self) -> AsyncGenerator[tuple[int, Piece, Any], None]:
        """Yield (number, piece, its `logprobs`) as they come. With `echo`, the first piece of a text begins with the
        prompt. Raises ClientGoneError if the client has gone."""
        left, looked_at = len(self._counts), time.monotonic()
        shown = [choice.shown for choice in self._asked.choices]
        try:
            while left:
                piece: Piece | RefusedError | None = None
                with contextlib.suppress(TimeoutError):
                    piece = await asyncio.wait_for(self._job.pieces.get(), GONE_S)
                if time.monotonic() - looked_at > GONE_S:
                    looked_at = time.monotonic()
                    if await self._request.is_disconnected():
                        raise ClientGoneError
                if isinstance(piece, RefusedError):
                    raise piece
                if piece is not None:
                    if self._asked.silent:
                        piece = replace(piece, text="", tokens=0, end="length", scores=())
                    number: int = piece.key
                    telling = self._asked.choices[number].telling
                    self._counts[number] = piece.tokens
                    left -= piece.end is not None
                    lists = telling.of(piece) if telling else None
                    yield number, replace(piece, text=shown[number] + piece.text), lists
                    shown[number] = ""
        finally:
            self.close()


class Stream(StreamingResponse):
    """An answer as server-sent events."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.events(), media_type="text/event-stream",
                         headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:  # also if the client goes before the first event
            self._answer.close()


class Door:
    """Middleware that refuses a request before anything reads it.

    Args:
        hosts: allowed names of the server. IP addresses are always allowed: a foreign page can make its own name point
            here (DNS rebinding), but not an address.
        key: requests need it as `Authorization: Bearer ...`; None: no key is needed.
    """

    def __init__(self, app: ASGIApp, hosts: frozenset[str], key: str | None) -> None:
        self.app, self.hosts, self.key = app, hosts, key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        app = self.app
        if scope["type"] == "http":
            try:
                self.check(scope["path"], Headers(scope=scope))
            except RefusedError as error:
                app = JSONResponse(error.body(), error.status, error.headers)
        await app(scope, receive, send)

    def check(self, path: str, headers: Headers) -> None:
        """Raise RefusedError if a request is not allowed."""
        host, origin = headers.get("host", "").lower(), headers.get("origin", "").lower()
        if (name := _name(f"//{host}")) not in self.hosts and not _is_address(name):
            raise RefusedError(f"This server is not called {host!r}. Start it with --allow-host to add a name.",
                               status=400, code="unknown_host")
        # The page's own origin is the host of its request; behind a proxy, one of the given names.
        if origin and origin.partition("//")[2] != host and _name(origin) not in self.hosts.difference(LOCAL):
            raise RefusedError(f"Pages of {origin!r} may not use this server.", status=403, code="other_origin")
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if self.key is not None and path not in OPEN and not (
                scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), self.key.encode())):
            raise RefusedError("This server needs its key: send the header `Authorization: Bearer KEY`.", status=401,
                               code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def _name(url: str) -> str:
    """The host name in a URL; "" if there is none."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        return bool(ipaddress.ip_address(name))
    except ValueError:
        return False


def _event(value: Any) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RefusedError)
    return JSONResponse(error.body(), error.status, error.headers)


async def _http_error(request: Request, error: Exception) -> Response:
    """Answer a request with an unknown path or method."""
    assert isinstance(error, HTTPException)
    told = RefusedError(f"{request.method} {request.url.path}: {error.detail}. There are GET /v1/models, /health and "
                        f"/, POST /v1/completions, and /v1/chat/completions where the tokenizer has a chat template.")
    return JSONResponse(told.body(), status_code=error.status_code, headers=error.headers)
