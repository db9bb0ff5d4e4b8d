"""Command-line options of the tools that generate text."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import TYPE_CHECKING

from drover.model.generation.sampling import Sampling
from drover.pipeline.config.plugins import add_plugin_option
from drover.pipeline.core.command_line import find_model
from drover.pipeline.core.errors import UserError
from drover.pipeline.evaluation.open_model import open_model
from drover.pipeline.records.weight_files import weights_folder

if TYPE_CHECKING:
    from drover.pipeline.evaluation.open_model import OpenedModel

DTYPES = ("float32", "bfloat16", "float16", "float64")


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """--model, --plugin, --device and --dtype, for `opened_model`."""
    parser.add_argument("--model", required=True, type=find_model, metavar="PATH",
                        help="a run's name or folder (its newest checkpoint), a checkpoint, or a Hugging Face folder")
    add_plugin_option(parser)
    parser.add_argument("--device",
                        help="cpu, cuda, cuda:1 ..., mps (Apple's GPU); default: a GPU of CUDA if there is one")
    parser.add_argument("--dtype", choices=DTYPES, help="precision; default: bfloat16 on a GPU, else float32")


def opened_model(options: argparse.Namespace) -> OpenedModel:
    """Open the model of `--model`. UserError if there is none, or no such device."""
    weights_folder(options.model)  # refuses a missing model before torch is imported
    import torch

    from drover.model.devices import automatic, find_device

    try:
        device = find_device(options.device or automatic())
    except ValueError as error:
        raise UserError(f"--device {error}") from None
    dtype = options.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    return open_model(options.model, device, getattr(torch, dtype))


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """The fields of `Sampling`, for `asked_sampling`."""
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


def asked_sampling(options: argparse.Namespace, ending_ids: frozenset[int]) -> Sampling:
    """The sampling settings of the command line. UserError with everything that is wrong with them."""
    try:
        given = {own.name: getattr(options, own.name) for own in fields(Sampling) if hasattr(options, own.name)}
        return Sampling(**{**given, "stop": tuple(options.stop), "stop_ids": ending_ids})
    except ValueError as error:
        raise UserError(str(error)) from None
