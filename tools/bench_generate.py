"""How fast is one text written? Ours beside transformers' `generate`, batch 1, in one process, as a table and JSON.

    python -m tools.bench_generate
    python -m tools.bench_generate --preset ladder_15m --threads 1 --json out.json

Both have the same random weights, read the same prompt and take the likeliest token each time, with their caches of
keys and values. Every round times one after the other, the order turned round each time, and gives one ratio, so that a
slow moment of the machine mostly meets both; the median of the rounds is what counts. A time is that of the whole text,
prompt included. Beside the clock's ratio stands that of processor time, which on a busy machine is the steadier one: it
does not count waiting for a core (but with several threads what they burn while they wait for each other).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model.config import ModelConfig
from model.generation.sampling import Sampling
from model.presets import PRESETS, preset
from pipeline.errors import UserError

if TYPE_CHECKING:
    import torch

    from model.llama import Llama

DTYPES = ("float32", "bfloat16")
Write = Callable[[], list[int]]
"""Continues the prompt; the new tokens."""


def ours(model: Llama, prompt: list[int], new: int) -> Write:
    """Drover's way, as chat and server go it."""
    from model.generation.batch import Batch

    def write() -> list[int]:
        batch = Batch(model)
        row = batch.add(prompt, Sampling(max_tokens=new))
        while len(batch):
            batch.step()
        return row.tokens
    return write


def theirs(folder: Path, device: torch.device, dtype: torch.dtype, prompt: list[int], new: int) -> Write:
    """transformers' `generate` with its defaults."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, trust_remote_code=False).eval().to(device)
    ids = torch.tensor([prompt], device=device)
    mask = torch.ones_like(ids)

    def write() -> list[int]:
        found = model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False)
        return list(found[0, len(prompt):].tolist())
    return write


def contenders(config: ModelConfig, device: torch.device, dtype: torch.dtype, prompt: list[int],
               new: int) -> dict[str, Write]:
    """Both with the same random weights, by name."""
    from model.llama import Llama, initialise
    from pipeline.formats.huggingface import Source, huggingface_files, write_folder
    from pipeline.formats.weights import load_model, open_weights

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
        return {"ours": ours(model, prompt, new), "transformers": theirs(folder, device, dtype, prompt, new)}


def timed(write: Write) -> tuple[float, float, list[int]]:
    """Seconds by the clock, seconds of the processor, and what was written."""
    clock, processor = time.perf_counter(), time.process_time()
    tokens = write()
    return time.perf_counter() - clock, time.process_time() - processor, tokens


def measure(writers: dict[str, Write], threads: int, rounds: int) -> dict[str, Any]:
    """Time both `rounds` times after each has written once; see `figures`."""
    import torch

    torch.set_num_threads(threads)
    written = {name: write() for name, write in writers.items()}
    seconds: dict[str, list[float]] = {name: [] for name in writers}
    processor: dict[str, list[float]] = {name: [] for name in writers}
    for number in range(rounds):
        for name in sorted(writers, reverse=number % 2 == 1):
            clock, spent, tokens = timed(writers[name])
            assert tokens == written[name], "what is greedy is the same each time"
            seconds[name].append(clock)
            processor[name].append(spent)
    return {"threads": threads, "same_tokens": written["ours"] == written["transformers"],
            **figures(seconds, processor, len(written["ours"]))}


def figures(seconds: dict[str, list[float]], processor: dict[str, list[float]], new: int) -> dict[str, Any]:
    """What the times come to: milliseconds a new token, and transformers' times over ours of the same round."""
    return {"seconds": seconds, "processor_seconds": processor,
            "ms_per_token": {name: statistics.median(found) / new * 1e3 for name, found in seconds.items()},
            "ratio": spread(seconds), "processor_ratio": spread(processor)}


def spread(seconds: dict[str, list[float]]) -> dict[str, float]:
    """Least, median and greatest of the rounds' ratios; above 1 ours is faster."""
    ratios = [other / own for own, other in zip(seconds["ours"], seconds["transformers"], strict=True)]
    return {"min": min(ratios), "median": statistics.median(ratios), "max": max(ratios)}


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    lines = [f"{result['preset']}, {result['parameters']:,} parameters, {result['dtype']} on {result['device']}, batch "
             f"1, {result['prompt']} tokens of prompt, {result['new']} new ones, {result['rounds']} rounds; torch "
             f"{result['torch']}, transformers {result['transformers']}, {result['capability']}", "",
             "| threads | ours, ms a token | transformers, ms a token | transformers / ours, min / median / max "
             "| the same of processor time | same tokens |", "|---|---|---|---|---|---|"]
    for run in result["runs"]:
        ratios = [" / ".join(f"{run[key][which]:.2f}" for which in ("min", "median", "max"))
                  for key in ("ratio", "processor_ratio")]
        lines.append(f"| {run['threads']} | {run['ms_per_token']['ours']:.2f} | "
                     f"{run['ms_per_token']['transformers']:.2f} | {' | '.join(ratios)} | "
                     f"{'yes' if run['same_tokens'] else 'no'} |")
    return "\n".join(lines)


def bench(options: argparse.Namespace) -> dict[str, Any]:
    """Everything that was asked for. UserError for what cannot be written."""
    low = [f"--{name} must be above 0, not {value}" for name in ("vocabulary", "prompt", "new", "rounds")
           if (value := getattr(options, name)) <= 0]
    low += [f"--threads must be above 0, not {count}" for count in options.threads if count <= 0]
    if low:
        raise UserError("; ".join(low) + ".")
    config = preset(options.preset)
    config = config.model_copy(update={"vocab_size": config.vocab_size or options.vocabulary})
    if options.prompt + options.new > config.context_length:
        raise UserError(f"{options.prompt} tokens of prompt and {options.new} new ones exceed the context of "
                        f"{options.preset}, {config.context_length}. Ask for fewer.")
    import torch

    ids = torch.randint(config.vocab_size or 0, (options.prompt,), generator=torch.Generator().manual_seed(0)).tolist()
    device = torch.device(options.device)
    writers = contenders(config, device, getattr(torch, options.dtype), ids, options.new)
    before = torch.get_num_threads()
    try:
        runs = [measure(writers, threads, options.rounds) for threads in options.threads]
    finally:
        torch.set_num_threads(before)
    capability = torch.cuda.get_device_name(device) if device.type == "cuda" else \
        torch.backends.cpu.get_cpu_capability()
    return {"preset": options.preset, "parameters": config.parameter_count, "dtype": options.dtype,
            "device": str(device), "prompt": options.prompt, "new": options.new, "rounds": options.rounds,
            "torch": torch.__version__, "transformers": metadata.version("transformers"), "capability": capability,
            "runs": runs}


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench_generate", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--preset", choices=list(PRESETS), default="ladder_42m", metavar="NAME",
        help="shape of the model; python -m tools.presets lists them (default ladder_42m)")
    add("--vocabulary", type=int, default=32000, metavar="N", help="of presets without one (default 32000)")
    add("--prompt", type=int, default=20, metavar="N", help="tokens of the prompt (default 20)")
    add("--new", type=int, default=60, metavar="N", help="tokens to be written (default 60)")
    add("--rounds", type=int, default=5, metavar="N", help="times that each writes (default 5)")
    add("--threads", type=int, nargs="+", default=[1, 2], metavar="N", help="CPU threads (default 1, then 2)")
    add("--dtype", choices=DTYPES, default="float32", help="of weights and arithmetic (default float32)")
    add("--device", default="cpu", help="cpu, cuda, cuda:1 ... (default cpu)")
    add("--json", type=Path, metavar="FILE", help="also write the figures here")
    options = parser.parse_args(arguments)
    try:
        result = bench(options)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    print(table(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
