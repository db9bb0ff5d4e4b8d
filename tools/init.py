"""Propose a configuration for your own text: model, vocabulary and steps that fit the files and this machine.

    drover init notes/
    drover init notes/ --minutes 60 --to notes.yaml
    drover init notes/ --params 10M

The file gives the reason for each value. Change what you know better.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shlex
import sys
import time
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path

from drover.launch.local import find_machine
from drover.model.config import ModelConfig
from drover.model.presets import ladder_step
from drover.pipeline.config.loading import load_config
from drover.pipeline.config.training import read_tokens, tokens_text
from drover.pipeline.core.console import Parser, Program, duration, echo, refuse_low
from drover.pipeline.core.errors import UserError
from drover.pipeline.core.files import write_text
from drover.tools.presets import CHINCHILLA
from drover.tools.survey import Corpus, look

CPU_SHARE = 0.6
"""Share of the speed of matrix products that training reaches on CPUs: the middle of what was measured, from 0.4 to
1.0."""
GPU_FLOPS = 0.35 * 300e12
"""FLOP/s of a GPU: a careful guess that does not depend on its model."""
SIZE = 1024
"""Rows and columns of the matrices in the speed test: 2 GFLOP a product, some 10 ms on two cores."""
TEST_S = 0.1
"""Seconds of the speed test, however slow the machine is."""
EPOCHS = 4
"""Up to so many epochs, repeated text teaches nearly as much as new text (Muennighoff et al., 2023)."""
BYTES = 512
"""Ids of the vocabulary of bytes, with the special ones. Smaller corpora than 0.5 MB take it: one of 1,024 learned ids
may need more text than there is."""
FEW_DOCUMENTS = 500
"""With fewer, the validation text is the end of each source: too few documents could be drawn at random."""
MUON_WIDTH = 512
"""Up to this width a short training learns more under Muon (benchmarks/RESULTS.md)."""


@dataclass(frozen=True)
class Proposal:
    """A proposed model and training.

    corpus_tokens: tokens in the text, about. tokens: to train on. limit: what decided their number, in words.
    """

    shape: ModelConfig
    corpus_tokens: int
    tokens: int
    limit: str
    seconds: float

    @property
    def batch_tokens(self) -> int:
        """Of an optimizer step: some 400 steps, in sequences by the power of two."""
        size = 2 ** round(math.log2(max(1, self.tokens / 400)))
        return min(2**19, max(8 * self.shape.context_length, size))

    @property
    def steps(self) -> int:
        """Optimizer steps."""
        return max(20, self.tokens // self.batch_tokens)


def add_options(parser: Parser) -> None:
    """The options."""
    parser.add_argument("data", type=Path, metavar="DATA", help="a folder of text files")
    how_much = parser.add_mutually_exclusive_group()
    how_much.add_argument("--minutes", type=float, default=10.0, help="of training on this machine (default 10)")
    how_much.add_argument("--params", type=_count, metavar="N", help="parameters of the model, such as 10M")
    parser.add_argument("--to", type=Path, metavar="FILE", help="the file to write (default: the folder's name.yaml)")


def _count(text: str) -> int:
    """A number such as 10M."""
    if isinstance(result := read_tokens(text), int):
        return result
    raise UserError(f"--params takes a number above 0, such as 10M, not {text}.")


def work(options: argparse.Namespace) -> None:
    """Write the configuration, and print what it is based on."""
    refuse_low(options, "minutes", "params")
    target = options.to or Path(f"{_name(options.data)}.yaml")
    if target.exists():
        raise UserError(f"{target} is there already. Give another name with --to, or remove it.")
    corpus, machine = look(options.data), find_machine()
    rate = machine.gpus * GPU_FLOPS or CPU_SHARE * matrix_rate(machine.cores)
    proposal = propose(corpus, rate, options.minutes, options.params)
    write_text(target, as_yaml(corpus, proposal, _name(options.data)))
    load_config(target)
    for remark in corpus.remarks:
        echo(remark)
    echo(f"{corpus.files:,} files, {corpus.text_bytes / 1e6:,.1f} MB of text, about "
         f"{tokens_text(proposal.corpus_tokens)} tokens\n"
         f"{tokens_text(proposal.shape.parameter_count)} parameters, {tokens_text(proposal.tokens)} tokens "
         f"({proposal.limit}), {proposal.steps:,} steps: about {duration(proposal.seconds)} of training here\n"
         f"{target} is written. Read it, then:\n"
         f"  drover run --config {shlex.quote(str(target))} --cluster local")


def matrix_rate(cores: int) -> float:
    """FLOP/s of `cores` cores in float32 products, without importing torch.

    Measured in processor time, which other programs change little: the machine's full speed, not what is free now.
    """
    import numpy as np

    left = np.full((SIZE, SIZE), 0.5, dtype=np.float32)
    best = 0.0
    began = time.perf_counter()
    while not best or time.perf_counter() - began < TEST_S:
        start = time.process_time()  # of all threads together
        left @ left
        best = max(best, 2 * SIZE**3 / max(1e-9, time.process_time() - start))
    return best * cores


def propose(corpus: Corpus, flops: float, minutes: float, params: int | None) -> Proposal:
    """A model and its training, from the text and the FLOP/s. `params`, if given, replaces the minutes."""
    vocabulary = min(32768, max(BYTES, 2 ** round(math.log2(math.sqrt(corpus.text_bytes)))))
    token_bytes = 1.0 if vocabulary == BYTES else 0.37 * math.log2(vocabulary) - 1.5  # as measured
    text = 1 + int(corpus.text_bytes / token_bytes)
    budget = params or math.sqrt(flops * 60 * minutes / (6 * CHINCHILLA))
    tokens = int(min(CHINCHILLA * budget, EPOCHS * text))
    limit = f"{tokens / text:.2g} epochs of your text" if tokens >= text else f"{tokens / text:.0%} of your text"
    wanted = params or max(1.0, tokens / CHINCHILLA)
    length = 1024 if tokens >= 20e6 else 512 if tokens >= 4e6 else 256
    shapes = [ladder_step(depth).model_copy(update={"context_length": length, "vocab_size": vocabulary})
              for depth in range(2, 49)]
    shape = min(shapes, key=lambda shape: abs(math.log(shape.parameter_count / wanted)))
    return Proposal(shape, text, tokens, limit, tokens * shape.flops_per_token(length, causal=False) / flops)


def as_yaml(corpus: Corpus, proposal: Proposal, name: str) -> str:
    """The configuration, each choice with its reason."""
    shape, steps = proposal.shape, proposal.steps
    muon = shape.dim <= MUON_WIDTH
    lr = 0.01 if muon else 0.003239 - 0.0001395 * math.log(shape.non_embedding_parameter_count)
    few = corpus.files < FEW_DOCUMENTS
    validation = min(0.05, max(0.001, 2e6 / corpus.text_bytes))
    rule = "tail   # few files: the end of the text, not files drawn at random" if few else "hash"
    prompts = corpus.prompts or ["The "]
    vocabulary = ("kind: byte   # too little text for a vocabulary of its own" if shape.vocab_size == BYTES else
                  f"vocab_size: {shape.vocab_size}   # about the square root of the text's bytes")
    return f"""\
# Proposed for {corpus.files:,} files with {corpus.text_bytes / 1e6:,.1f} MB of text. Change what you know better.
{"".join(f"# {remark}{chr(10)}" for remark in corpus.remarks)}name: {_quoted(name)}

shard:
  sources:
{_sources(corpus)}
  shard_mb: {min(64.0, max(1.0, round(corpus.text_bytes / 8e6, 1)))}   # several shards for each process
  validation_share: {validation:.2g}
  validation_rule: {rule}

tokenizer:
  {vocabulary}

model:   # {tokens_text(shape.parameter_count)} parameters; {CHINCHILLA} tokens for each use compute best
  dim: {shape.dim}
  layers: {shape.layers}
  heads: {shape.heads}
  kv_heads: {shape.kv_heads}
  multiple_of: {shape.multiple_of}
  context_length: {shape.context_length}
  rope_theta: {shape.rope_theta}
  tied_embeddings: true

train:   # {tokens_text(proposal.tokens)} tokens, {proposal.limit}; beyond {EPOCHS} epochs, repeated text teaches little
  steps: {steps}
  sequence_length: {shape.context_length}
  batch_tokens: {proposal.batch_tokens}
  optimizer: {'muon' if muon else 'adamw'}
  lr: {lr:.2g}
  warmup_steps: {max(1, steps // 20)}
  validation_every: {max(1, steps // 4)}
  sample_every: {max(1, steps // 2)}
  prompts: {_flow(prompts)}
  checkpoint: {{every_steps: {max(1, steps // 4)}}}

evaluate:
  prompts: {_flow(prompts)}
"""


def _sources(corpus: Corpus) -> str:
    """A line for each kind of files."""
    lines = dict[str, str]()
    for kind, paths in corpus.sources.items():
        base = re.sub(r"[^A-Za-z0-9_]+", "-", kind.text_field or "text").strip("-")[:40] or "records"
        name = next(own for own in chain([base], (f"{base}-{number}" for number in count(2))) if own not in lines)
        more = "".join(f", {key}: {_quoted(value)}" for key, value in kind.settings().items())
        lines[name] = f"    - {{kind: files, name: {name}, paths: {_flow(paths)}{more}}}"
    return "\n".join(lines.values())


def _flow(texts: list[str]) -> str:
    return f"[{', '.join(map(_quoted, texts))}]"


def _quoted(text: str) -> str:
    """A text in YAML, whatever is in it: JSON's form."""
    return json.dumps(text, ensure_ascii=False)


def _name(folder: Path) -> str:
    """A run's name from a folder's."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", folder.resolve().name).strip("-._") or "mine"


main = Program("python -m drover.tools.init", __doc__, add_options, work)

if __name__ == "__main__":
    sys.exit(main())
