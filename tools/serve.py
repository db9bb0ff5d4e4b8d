"""Serve a model over HTTP with OpenAI's completions API, and a page to try it on.

    drover serve --model runs/demo
    curl localhost:8000/v1/completions -H 'Content-Type: application/json' -d '{"prompt": "def ", "max_tokens": 40}'

Concurrent requests are generated in one batch. Only this machine can connect, unless --host says otherwise. With
--api-key FILE, or DROVER_API_KEY in the environment, requests need that key (`Authorization: Bearer KEY`); the page and
/health do not.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from contextlib import suppress
from pathlib import Path

from drover.pipeline.core.command_line import Parser, Program
from drover.pipeline.core.errors import UserError, require
from drover.pipeline.evaluation.open_model import run_of
from drover.pipeline.evaluation.prompts import chat_template, ending_ids, readable_bytes
from drover.pipeline.records.weight_files import weights_folder
from drover.tools.model_options import add_model_options, opened_model

KEY_VARIABLE = "DROVER_API_KEY"
CLOSING_S = 5
"""Seconds that open answers may take to end after Ctrl-C."""


def add_options(parser: Parser) -> None:
    """The options."""
    add_model_options(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1: this machine)")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one (default 8000)")
    parser.add_argument("--api-key", type=Path, metavar="FILE", help="a file with the key that requests must bring; "
                        f"without it, {KEY_VARIABLE} of the environment, if it is set")
    parser.add_argument("--allow-host", action="append", default=[], metavar="NAME",
                        help="another host name that clients may use, besides addresses and the server's own name")
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="texts generated at once (default 8)")
    parser.add_argument("--queue", type=int, default=32, metavar="N",
                        help="texts that may wait; further requests get status 429 (default 32)")
    parser.add_argument("--name", help="what clients call the model; default: its run's name, or its folder's")


def serve(options: argparse.Namespace) -> None:
    """Listen until Ctrl-C. UserError if there is no such model, address or package."""
    if options.batch < 1 or options.queue < 0:
        raise UserError(f"--batch must be at least 1 and --queue at least 0; they are {options.batch} and "
                        f"{options.queue}.")
    key = _key(options.api_key)
    with _listening(options.host, options.port) as listening:
        weights_folder(options.model)  # refuses a missing model before the server and torch are imported
        for package in ("uvicorn", "starlette"):
            require("the server", package)
        import uvicorn

        from drover.tools.serving.app import LOCAL, Server
        from drover.tools.serving.asked import Reader
        from drover.tools.serving.worker import Worker

        opened = opened_model(options)
        run = run_of(opened.path)
        name = options.name or (run.folder if run is not None else opened.path).resolve().name
        worker = Worker(opened.model, readable_bytes(opened.tokenizer), batch=options.batch, queue=options.queue)
        reader = Reader(opened, name, ending_ids(opened), chat_template(opened))
        names = {*LOCAL, *options.allow_host, *([] if options.host in LOCAL else
                                                [options.host, socket.gethostname(), socket.getfqdn()])}
        server = Server(reader, worker, frozenset(name.lower() for name in names), key)
        chats = ", /v1/chat/completions" if reader.template is not None else ""
        host, port = listening.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        print(f"{name} at http://{shown}:{port}/ (a page), /v1/completions{chats}, /v1/models, /health. "
              f"Ctrl-C ends it.", flush=True)
        config = uvicorn.Config(server.app, log_level="warning", timeout_graceful_shutdown=CLOSING_S)
        with suppress(KeyboardInterrupt):  # uvicorn has ended everything, and passes it on
            uvicorn.Server(config).run(sockets=[listening])


def _key(file: Path | None) -> str | None:
    """The key that requests need. UserError if it cannot be read or is not one line of ASCII."""
    if file is None:
        key, place = os.environ.get(KEY_VARIABLE), KEY_VARIABLE
        if key is None:
            return None
    else:
        place = str(file)
        try:
            key = file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise UserError(f"The key of --api-key cannot be read from {file}: {error}.") from None
    key = key.strip()
    if not key or not key.isascii() or not key.isprintable():
        raise UserError(f"{place} holds no key: it has to be one line of ASCII characters, and is "
                        f"{'empty' if not key else 'something else'}.")
    return key


def _listening(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=128)
    except (OSError, OverflowError) as error:
        raise UserError(f"{host}:{port} cannot be listened on: {error}. Another program may have it: take another "
                        f"--port, or 0 for any.") from None


main = Program("python -m drover.tools.serve", __doc__, add_options, serve)

if __name__ == "__main__":
    sys.exit(main())
