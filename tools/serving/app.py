"""The routes: completions and chats as OpenAI has them, what the page asks for, and the page."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from model.generation.writer import Piece
from pipeline.evaluation.open_model import run_of
from pipeline.files import read_lines
from tools.serving.answers import Form, error_object, event, usage
from tools.serving.asked import Asked, Read, Reader, RefusedError
from tools.serving.door import Door
from tools.serving.logprobs import joined
from tools.serving.worker import Job, Worker

PAGE = Path(__file__).with_name("page.html")
LARGEST_BODY = 16 * 2**20
"""Bytes of a request."""
GONE_S = 0.25
"""How often is asked whether the client is still there."""
SECURITY = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
                                       "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'",
            "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}


class ClientGoneError(Exception):
    """Nobody is there to be answered."""


class Server:
    """One model behind HTTP.

    Args:
        reader: what requests may ask for.
        worker: what serves them; closed with the application.
        hosts, key: see `Door`.
    """

    def __init__(self, reader: Reader, worker: Worker, hosts: frozenset[str], key: str | None = None) -> None:
        self.reader, self.worker, self.started = reader, worker, int(time.time())
        routes = [Route("/", self.page), Route("/health", self.health), Route("/samples", self.samples),
                  Route("/v1/models", self.models), Route("/v1/completions", self.completions, methods=["POST"])]
        if reader.template is not None:
            routes.append(Route("/v1/chat/completions", self.chats, methods=["POST"]))
        self.app = Starlette(routes=routes, lifespan=self._lifespan,
                             middleware=[Middleware(Door, hosts=hosts, key=key)],
                             exception_handlers={RefusedError: _refused, HTTPException: _http_error})

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(self.worker.close)

    async def page(self, request: Request) -> Response:
        """GET /"""
        return HTMLResponse(PAGE.read_text(encoding="utf-8"), headers=SECURITY)

    async def health(self, request: Request) -> Response:
        """GET /health"""
        return JSONResponse({"status": "ok", "model": self.reader.name, **self.worker.counts()})

    async def samples(self, request: Request) -> Response:
        """GET /samples: what the run wrote while it trained, [] where there is no run."""
        run = run_of(self.reader.opened.path)
        file = run.folder / "train/samples.jsonl" if run is not None else None
        return JSONResponse(list(read_lines(file)) if file is not None else [])

    async def models(self, request: Request) -> Response:
        """GET /v1/models"""
        model = {"id": self.reader.name, "object": "model", "created": self.started, "owned_by": "drover",
                 "context_length": self.reader.opened.config.context_length, "chat": self.reader.template is not None}
        return JSONResponse({"object": "list", "data": [model]})

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions"""
        return await self._answer(request, self.reader.completion, Form(self.reader.name, chat=False))

    async def chats(self, request: Request) -> Response:
        """POST /v1/chat/completions"""
        return await self._answer(request, self.reader.chat, Form(self.reader.name, chat=True))

    async def _answer(self, request: Request, read: Read, form: Form) -> Response:
        # In a thread: a long text takes long to become ids, and streams must go on meanwhile.
        asked = await asyncio.to_thread(read, await _body(request))
        texts = Texts(request, self.worker, asked)
        if asked.stream:
            return Stream(texts, _events(texts, asked, form))
        written, ends = list(asked.shown), [None] * len(asked.prompts)  # type: list[str], list[Any]
        told: list[list[Any]] = [[] for _ in written]
        try:
            async for number, piece in texts:
                written[number] += piece.text
                ends[number] = piece.end
                if asked.tellings:
                    told[number].append(asked.tellings[number].of(piece))
        except ClientGoneError:
            return Response(status_code=499)  # as nginx calls it; nobody reads it
        return JSONResponse(form.whole(written, ends, usage(asked.prompt_tokens, texts.tokens),
                                       [joined(parts) if asked.tellings else None for parts in told]))


class Texts:
    """The pieces of a request's texts, as (number, piece). The places are free again when the iteration ends, however
    it does.

    Attributes:
        tokens: that were written so far.

    Raises:
        RefusedError: at once where the queue is full; while iterating where the model failed.
        ClientGoneError: while iterating.
    """

    def __init__(self, request: Request, worker: Worker, asked: Asked) -> None:
        self._request, self._worker = request, worker
        self._pieces: asyncio.Queue[Piece | RefusedError] = asyncio.Queue()
        self._counts = [0] * len(asked.prompts)
        loop = asyncio.get_running_loop()
        self._job = Job(asked.prompts, asked.samplings,
                        lambda piece: _to_loop(loop, self._pieces, piece))
        worker.submit(self._job)

    @property
    def tokens(self) -> int:
        return sum(self._counts)

    def close(self) -> None:
        """Nobody wants more."""
        self._worker.cancel(self._job)

    async def __aiter__(self) -> AsyncGenerator[tuple[int, Piece], None]:
        left, asked_at = len(self._counts), time.monotonic()
        try:
            while left:
                piece: Piece | RefusedError | None = None
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(GONE_S):
                        piece = await self._pieces.get()
                if time.monotonic() - asked_at > GONE_S:
                    asked_at = time.monotonic()
                    if await self._request.is_disconnected():
                        raise ClientGoneError
                if isinstance(piece, RefusedError):
                    raise piece
                if piece is not None:
                    assert isinstance(piece.key, int)
                    self._counts[piece.key] = piece.tokens
                    left -= piece.end is not None
                    yield piece.key, piece
        finally:
            self.close()


class Stream(StreamingResponse):
    """Server-sent events."""

    def __init__(self, texts: Texts, events: AsyncIterator[str]) -> None:
        super().__init__(events, media_type="text/event-stream",
                         headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._texts = texts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:  # also where the client went before the first event was asked for
            self._texts.close()


def _to_loop(loop: asyncio.AbstractEventLoop, queue: asyncio.Queue[Any], piece: Any) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits
        loop.call_soon_threadsafe(queue.put_nowait, piece)


async def _events(texts: Texts, asked: Asked, form: Form) -> AsyncIterator[str]:
    """The body of a stream. An error in it is its last event: the status is sent already."""
    begun: set[int] = set()
    try:
        async for number, piece in texts:
            text = piece.text if number in begun else asked.shown[number] + piece.text
            told = asked.tellings[number].of(piece) if asked.tellings else None
            yield event(form.chunk(number, text, piece.end, first=number not in begun, logprobs=told))
            begun.add(number)
        if asked.include_usage:
            yield event(form.last(usage(asked.prompt_tokens, texts.tokens)))
        yield event("[DONE]")
    except RefusedError as error:
        yield event(error_object(error))
    except ClientGoneError:
        return


async def _body(request: Request) -> bytes:
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > LARGEST_BODY:
            raise RefusedError(f"The request is larger than {LARGEST_BODY} bytes.", status=413)
    return body


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RefusedError)
    headers = {"Retry-After": str(error.retry_after_s)} if error.retry_after_s is not None else None
    return JSONResponse(error_object(error), status_code=error.status, headers=headers)


async def _http_error(request: Request, error: Exception) -> Response:
    """No such place, or another method."""
    assert isinstance(error, HTTPException)
    told = RefusedError(f"{request.method} {request.url.path}: {error.detail}. There are GET /v1/models, /health and "
                        f"/, POST /v1/completions, and /v1/chat/completions where the tokenizer has a chat template.")
    return JSONResponse(error_object(told), status_code=error.status_code, headers=error.headers)
