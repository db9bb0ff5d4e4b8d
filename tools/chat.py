"""Generate text with a model: continue prompts, or chat with one that was trained on conversations.

    drover chat runs/demo "def main():" "import "
    drover chat runs/demo --interactive
    drover chat path/to/Llama-3.2-1B-Instruct --chat --interactive

Several prompts are continued together; the first is printed as it is generated. Ctrl-C ends a reply; at `>`, Ctrl-D
or `exit` ends the session.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from drover.model.generation.sampling import Sampling
from drover.pipeline.config.kinds import add_plugin_option
from drover.pipeline.core.console import Parser, Program, complain, echo, find_model
from drover.pipeline.core.errors import UserError
from drover.pipeline.evaluation.open_model import (
    ending_ids,
    hugging_face_tokenizer,
    named_if_nan,
    open_model,
    prompt_ids,
    readable_bytes,
)
from drover.pipeline.records.weight_files import weights_folder

CONTROL = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
"""Characters that move a terminal's cursor or change its colours; a model may have learned them."""
NEW = "/new"
EXITS = ("exit", "quit", "/exit", "/quit")
ENDS = "Ctrl-C ends a reply; Ctrl-D, or exit, ends the session"
DTYPES = ("float32", "bfloat16", "float16", "float64")


def add_options(parser: Parser) -> None:
    """The options."""
    parser.add_argument("model", type=find_model, metavar="MODEL",
                        help="a run's name or folder (its newest checkpoint), a checkpoint, or a Hugging Face folder")
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="texts to continue; with --chat, first messages")
    add_plugin_option(parser)
    parser.add_argument("--device",
                        help="cpu, cuda, cuda:1 ...; default: a GPU of CUDA if there is one")
    parser.add_argument("--dtype", choices=DTYPES, help="precision; default: bfloat16 on a GPU, else float32")
    for name, kind, default, metavar, text in (
            ("max-tokens", int, 256, "N", "the most tokens to generate (default 256)"),
            ("temperature", float, 0.8, "T", "sampling temperature; 0: the most likely token, always (default 0.8)"),
            ("top-k", int, None, "K", "sample from the K most likely tokens (default: all)"),
            ("top-p", float, 0.95, "P", "sample from the most likely tokens with probability P in sum (default 0.95)"),
            ("min-p", float, 0.0, "P", "sample tokens at least P times as likely as the most likely one (default 0)"),
            ("repetition-penalty", float, 1.0, "X", "above 1, tokens that occurred become less likely (default 1)"),
            ("seed", int, 0, "N", "random seed of the first text; the next takes N + 1 (default 0)")):
        parser.add_argument(f"--{name}", type=kind, default=default, metavar=metavar, help=text)
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT",
                        help="stop before this text; may be given several times")
    parser.add_argument("--interactive", action="store_true", help="ask for prompts, one a line")
    parser.add_argument("--chat", action="store_true", help="write prompts as turns of a conversation, by the "
                                                            "tokenizer's chat template")
    parser.add_argument("--system", metavar="TEXT", help="with --chat: what the conversation begins with")


def work(options: argparse.Namespace) -> None:
    """Continue the texts, and ask for others."""
    if not options.prompts and not options.interactive:
        raise UserError("There is nothing to continue: give a prompt, or --interactive.")
    session = Session(options)
    if options.prompts:
        session.write(options.prompts)
    if options.interactive:
        session.ask()


class Session:
    """One model and the texts, or the conversation, that it generates."""

    def __init__(self, options: argparse.Namespace) -> None:
        try:  # wrong settings are refused before a model is loaded, and a missing model before torch is
            sampling = Sampling(options.max_tokens, options.temperature, options.top_k, options.top_p, options.min_p,
                                options.repetition_penalty, options.seed, stop=tuple(options.stop))
        except ValueError as error:
            raise UserError(str(error)) from None
        weights_folder(options.model, download=True)
        import torch

        from drover.model.devices import automatic, find_device

        try:
            device = find_device(options.device or automatic())
        except ValueError as error:
            raise UserError(f"--device {error}") from None
        dtype = options.dtype or ("bfloat16" if device.type == "cuda" else "float32")
        self.opened = open_model(options.model, device, getattr(torch, dtype))
        self.sampling = replace(sampling, stop_ids=ending_ids(self.opened))
        self.template = ChatTemplate(self.opened.tokenizer_folder) if options.chat else None
        self.system = [{"role": "system", "content": options.system}] if options.system else []
        self.messages = list(self.system)
        self.written = 0

    def write(self, prompts: Sequence[str]) -> None:
        """Continue all prompts together. The first one is printed as it is generated, the others at the end."""
        from drover.model.generation.stream import stream

        ids = [self._ids(prompt) for prompt in prompts]
        settings = [replace(self._fitting(row), seed=(self.sampling.seed + self.written + number) % 2**63)
                    for number, row in enumerate(ids)]
        self.written += len(prompts)
        waiting = ["" if self.template else prompt for prompt in prompts]
        reply = ""
        try:
            with named_if_nan(self.opened):
                for piece in stream(self.opened.model, readable_bytes(self.opened.tokenizer), ids, settings):
                    waiting[piece.number] += piece.text
                    if piece.number == 0:
                        show(waiting[0])
                        waiting[0], reply = "", reply + piece.text
        finally:
            show("\n".join([*waiting, ""]))
            if self.template and len(prompts) == 1:  # an interrupted reply is remembered as far as it was shown
                self.messages += [{"role": "user", "content": prompts[0]}, {"role": "assistant", "content": reply}]

    def ask(self) -> None:
        """Read prompts from the terminal until it ends."""
        echo(f"{self.opened.path} takes a prompt a line; {ENDS}", file=sys.stderr)
        while True:
            try:
                prompt = input("> ")
            except EOFError:
                return
            except KeyboardInterrupt:
                print()
                echo(ENDS, file=sys.stderr)
                continue
            if prompt.strip() in EXITS:
                return
            if self.template and prompt.strip() == NEW:
                self.messages = list(self.system)
            elif prompt.strip():
                self._answer(prompt)

    def _answer(self, prompt: str) -> None:
        try:
            self.write([prompt])
        except KeyboardInterrupt:
            pass  # only the reply ends: ask for the next prompt
        except UserError as error:  # too long, or not what the template takes
            complain(str(error))

    def _ids(self, prompt: str) -> list[int]:
        if self.template is None:
            return prompt_ids(self.opened, prompt)
        return self.template.ids([*self.messages, {"role": "user", "content": prompt}])

    def _fitting(self, ids: Sequence[int]) -> Sampling:
        """The settings, with at most as many tokens as the context has room for. UserError if there is no room."""
        context = self.opened.config.context_length
        room = context - len(ids)
        if room < 1:
            more = f", or start a new conversation with {NEW}" if self.template else ""
            raise UserError(f"The prompt has {len(ids)} tokens, which leaves no room in the model's context of "
                            f"{context}. Shorten it{more}.")
        return replace(self.sampling, max_tokens=min(self.sampling.max_tokens, room))


def show(text: str) -> None:
    """Print without delay. On a terminal, replace control characters."""
    sys.stdout.write(text.translate(CONTROL) if sys.stdout.isatty() else text)
    sys.stdout.flush()


class ChatTemplate:
    """Formats a conversation for a model that was trained on conversations, by its tokenizer's template."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer, self.folder = hugging_face_tokenizer(folder), folder
        if not self.tokenizer.chat_template:
            raise UserError(f"The tokenizer in {folder} has no chat template; a model that was only pretrained has "
                            f"none. Leave --chat out: the model then continues texts.")

    def ids(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """The ids of a conversation up to where the model's answer begins, BOS included.

        messages: each with `role` and `content`. UserError where the template refuses them.
        """
        from jinja2 import TemplateError

        try:
            return list(self.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=True,
                                                           return_dict=False))
        except (TemplateError, TypeError, ValueError) as error:
            raise UserError(f"The chat template in {self.folder} does not accept this conversation: {error}") from None


main = Program("python -m drover.tools.chat", __doc__, add_options, work, mixed=True)

if __name__ == "__main__":
    sys.exit(main())
