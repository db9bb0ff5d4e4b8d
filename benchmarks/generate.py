"""One text (batch 1): ours beside transformers' `generate`, with the same random weights and prompt, in one process.

Both take the likeliest token each time, with their caches of keys and values. A time is that of the whole text.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.measuring import RATES, Record, alternated, compared, positive, timed
from drover.model.config import ModelConfig
from drover.model.presets import PRESETS, preset
from drover.pipeline.core.errors import UserError

if TYPE_CHECKING:
    import torch

Write = Callable[[], list[int]]
"""Continues the prompt; the new tokens."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare what can be asked for."""
    add = parser.add_argument
    add("--preset", choices=list(PRESETS), default="ladder_42m", metavar="NAME",
        help="shape of the model; python -m drover.tools.presets lists them (%(default)s)")
    add("--vocabulary", type=positive, default=32000, metavar="N", help="of presets without one (%(default)s)")
    add("--prompt", type=positive, default=20, metavar="N", help="tokens of the prompt (%(default)s)")
    add("--new", type=positive, default=60, metavar="N", help="tokens to be written (%(default)s)")
    add("--threads", type=positive, nargs="+", default=[1, 2], metavar="N", help="CPU threads (1, then 2)")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="of weights and arithmetic (%(default)s)")
    add("--device", default="cpu", help="cpu, cuda, cuda:1 ... (%(default)s)")


def run(options: argparse.Namespace, record: Record) -> None:
    """Write the same text by turns. UserError for what cannot be written."""
    config = preset(options.preset)
    config = config.model_copy(update={"vocab_size": config.vocab_size or options.vocabulary})
    if options.prompt + options.new > config.context_length:
        raise UserError(f"{options.prompt} tokens of prompt and {options.new} new ones exceed the context of "
                        f"{options.preset}, {config.context_length}. Ask for fewer.")
    import torch

    ids = torch.randint(config.vocab_size or 0, (options.prompt,), generator=torch.Generator().manual_seed(0)).tolist()
    writers = both(config, torch.device(options.device), getattr(torch, options.dtype), ids, options.new)
    record.facts |= {"preset": options.preset, "parameters": config.parameter_count, "dtype": options.dtype,
                     "device": options.device, "prompt": options.prompt, "new": options.new}
    threads_before = torch.get_num_threads()
    try:
        for threads in options.threads:
            torch.set_num_threads(threads)
            texts = [write() for write in writers.values()]
            taken = alternated({f"{name}, {threads} threads": timed(write) for name, write in writers.items()},
                               options.rounds)
            rows = compared(taken, options.new, "tokens", f"transformers, {threads} threads")
            same = "yes" if texts[0] == texts[1] else "no"
            record.add("One text", {**RATES, "same tokens": "{same}"}, *({**row, "same": same} for row in rows))
    finally:
        torch.set_num_threads(threads_before)


def both(config: ModelConfig, device: torch.device, dtype: torch.dtype, prompt: list[int],
         new: int) -> dict[str, Write]:
    """Both ways to continue a prompt."""
    import torch
    from transformers import AutoModelForCausalLM

    from drover.model.generation.batch import Batch
    from drover.model.generation.sampling import Sampling
    from drover.model.llama import Llama, initialise
    from drover.pipeline.formats.huggingface import Source, huggingface_files, write_folder
    from drover.pipeline.formats.weights import load_model, open_weights

    drawn = Llama(config)
    initialise(drawn, config, seed=0)
    state = drawn.state_dict()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "hf"
        # No id ends a text: all of them are as long as they may be.
        write_folder(folder, huggingface_files(Source(config, dtype, lambda name, *_: state[name]), 5_000_000_000, {
            "bos_token_id": None, "eos_token_id": None}))
        with open_weights(folder) as weights:
            model = load_model(weights, device, dtype)
        other: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, trust_remote_code=False)
    other.eval().to(device)
    ids = torch.tensor([prompt], device=device)

    def ours() -> list[int]:
        batch = Batch(model)
        row = batch.add(prompt, Sampling(max_tokens=new))
        while len(batch):
            batch.step()
        return row.tokens

    def theirs() -> list[int]:
        found = other.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)
        return list(found[0, len(prompt):].tolist())
    return {"ours": ours, "transformers": theirs}
