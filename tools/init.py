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
import shutil
import sys
import textwrap
import time
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path
from typing import Any

import yaml

from drover.launch.local import find_machine
from drover.launch.plan import Machine
from drover.model.config import ModelConfig
from drover.model.presets import LADDER
from drover.pipeline.config.data import ShardConfig
from drover.pipeline.config.loading import Dumper, load_config
from drover.pipeline.config.training import TrainConfig, read_tokens, tokens_text
from drover.pipeline.core.console import Parser, Program, counted, duration, echo, printable, refuse_low
from drover.pipeline.core.errors import UserError, absent
from drover.pipeline.core.files import write_text
from drover.tools.presets import CHINCHILLA
from drover.tools.survey import Corpus, look

CPU_SHARE = 0.6
"""Share of the speed of small matrix products that training reaches on CPUs (benchmarks/RESULTS.md)."""
GPU_FLOPS = 0.35 * 300e12
"""FLOP/s of a GPU: a careful guess that does not depend on its model."""
SIZE, PRODUCTS = 64, 40
"""Rows and columns of the matrices in the speed test, small enough for one thread, and products at a time: 20 MFLOP,
less than a millisecond."""
TEST_S = 0.5
"""Seconds of the speed test, however slow the machine is."""
START_S = 8.0
"""Seconds that a training takes besides its steps: imports, the first batch, samples, the last checkpoint."""
OTHER_S, OTHER_MB_S = 30.0, 1.0
"""Seconds that the stages before and after training take, and for each MB of text on one core, about."""
VALIDATION = 0.05
"""Share of the time of steps that validation may take in addition."""
EPOCHS = 4
"""Up to so many epochs, repeated text teaches nearly as much as new text (Muennighoff et al., 2023)."""
ROOM = 0.7
"""Share of these epochs that is proposed: the tokens are estimated, up to a third too many in text that repeats itself,
and some are validation text."""
MOST_RANKS = 8
"""Ranks on CPUs at most. Each has a core or several: ranks of one thread are faster than threads of one rank, and far
faster where other programs use the cores (benchmarks/RESULTS.md)."""
BYTES = 512
"""Ids of the vocabulary of bytes, with the special ones. Smaller corpora than 0.5 MB take it, and those of fewer words:
one of 1,024 learned ids may need more text than there is."""
FOR_CHARACTERS = 8
"""A vocabulary of fewer ids for each character that is not ASCII is one of bytes (`kind: bpe`): characters that stay
whole could be more than all of it."""
MOST_LEFT_OUT = 6
"""Reasons that are printed; the file has more."""
BITS, BITS_AT, BITS_POWER = 0.83, 2e6, 0.075
"""Bits per byte of validation text that models need after training on so many bytes, as a share of those of gzip -9;
and the power of the bytes with which they fall (benchmarks/RESULTS.md)."""
BITS_RULE = "benchmarks/RESULTS.md#what-drover-init-expects"
BITS_RANGE = 0.25
"""By how much of it texts differed, and some more."""
MOST_EMBEDDING = 1.5
"""The embedding has at most so many times the parameters of the blocks: a larger vocabulary costs more than it brings.
"""
MOST_BATCH = 2**19
"""Tokens of an optimizer step at most."""
PAGES_REJECTED = 0.1
"""Share of a crawl's bytes that may be pages of which no text can be extracted."""
TRAIN_MB = 100.0
"""A vocabulary is trained on at most so many MB of the text."""
FEW_DOCUMENTS = 500
"""With fewer, the validation text is the end of each source: too few documents could be drawn at random."""
LR_LAW = "0.003239 - 0.0001395 ln(parameters of the blocks): Kaplan et al. 2020"
MUON_WIDTH = 512
"""Up to this width a short training learns more under Muon (benchmarks/RESULTS.md)."""

CLEANING = """\
  filters:   # for pages of the web; `sources: [NAME]` in each spares the others. docs/data.md#filters has more, by
             # site, language and quality
    - {{kind: normalization, form: NFC, line_ends: true, trailing_space: true}}
    - {{kind: length, min_characters: 200}}   # not words: Japanese has no spaces
    - {{kind: gopher_repetition}}
  {}near_duplicates: {{preset: fineweb, words: characters}}   # {}
  keep_dropped: true   # shard/dropped has what filters drop, and why: look at it, then change the filters
"""
"""What is proposed for a crawl."""

LETTERS = str.maketrans({
    "ä": "ae", "ö": "oe", "ü": "ue", "Ä": "Ae", "Ö": "Oe", "Ü": "Ue", "ß": "ss", "æ": "ae", "Æ": "Ae", "ø": "oe",
    "Ø": "Oe", "œ": "oe", "Œ": "Oe", "ł": "l", "Ł": "L", "đ": "d", "Đ": "D", "ı": "i"})
"""How Latin letters are written in ASCII that are no letter with an accent, or not only that."""


@dataclass(frozen=True)
class Proposal:
    """A proposed model and training.

    corpus_tokens: tokens in the text, about. validation: the share of it that is held out. wanted: tokens to
    train on, about. token_bytes: bytes of text in one. ranks: on CPUs.
    """

    shape: ModelConfig
    corpus_tokens: int
    wanted: int
    token_bytes: float
    ranks: int
    validation: float = 0.0

    @property
    def epochs(self) -> str:
        """What of the text is trained on, in words."""
        share = self.tokens / (self.corpus_tokens * (1 - self.validation))
        of = "of the training text"
        return f"about {share:,.{share < 10:d}f} epochs {of}" if share >= 1 else f"about {100 * share:.2g}% {of}"

    @property
    def batch_tokens(self) -> int:
        """Tokens of an optimizer step: about a 400th of all, rounded to a power of two."""
        size = 2 ** round(math.log2(max(1, self.wanted / 400)))
        return min(MOST_BATCH, max(8 * self.shape.context_length, size))

    @property
    def steps(self) -> int:
        """Optimizer steps."""
        return max(20, self.wanted // self.batch_tokens)

    @property
    def tokens(self) -> int:
        """Tokens of all steps."""
        return self.steps * self.batch_tokens

    @property
    def muon(self) -> bool:
        """Whether Muon is proposed."""
        return self.shape.dim <= MUON_WIDTH

    @property
    def micro_batch(self) -> int:
        """Sequences that a rank computes at once."""
        return min(TrainConfig().micro_batch, self.batch_tokens // self.shape.context_length // self.ranks)

    def seconds(self, flops: float) -> float:
        """Seconds that training takes at `flops` FLOP/s: its start, steps and validation."""
        step = step_flops(self.shape, self.batch_tokens, self.shape.context_length, muon=self.muon)
        return START_S + (1 + VALIDATION) * self.steps * step / flops

    def expected(self, gzip_bits: float) -> str:
        """The bits per byte that it will need of validation text for which gzip needs so many, in words."""
        bits = gzip_bits * BITS * (self.wanted * self.token_bytes / BITS_AT) ** -BITS_POWER
        return (f"about {bits:.2f} bits per byte of validation text, between {bits * (1 - BITS_RANGE):.2f} and "
                f"{bits * (1 + BITS_RANGE):.2f}, by a rule from small models trained on 1 to 10 MB ({BITS_RULE})")


def step_flops(shape: ModelConfig, batch_tokens: int, length: int, *, muon: bool) -> float:
    """FLOP of an optimizer step on sequences of `length` tokens. Muon's iterations multiply 30 times the width's cube,
    and 12 times with the feed-forward width, for each of 5 and each layer."""
    update = 5 * shape.layers * shape.dim**2 * (30 * shape.dim + 12 * shape.hidden) if muon else 0
    return batch_tokens * shape.flops_per_token(length, causal=False) + update


def add_options(parser: Parser) -> None:
    """The options."""
    parser.add_argument("data", type=Path, metavar="DATA", help="a folder of text files")
    how_much = parser.add_mutually_exclusive_group()
    how_much.add_argument("--minutes", type=float, default=10.0, help="of training on this machine (default 10)")
    how_much.add_argument("--params", type=_count, metavar="N", help="parameters of the model, such as 10M")
    parser.add_argument("--to", type=Path, metavar="FILE", help="the file to write, whose name is the run's "
                        "(default: the folder's name.yaml)")


def _free(base: str, is_taken: Callable[[str], bool]) -> str:
    """The name, or the first of NAME-2, NAME-3 and so on that is free."""
    return next(name for name in chain([base], (f"{base}-{number}" for number in count(2))) if not is_taken(name))


def _count(text: str) -> int:
    """A number such as 10M."""
    if isinstance(result := read_tokens(text), int):
        return result
    raise UserError(f"--params takes a number above 0, such as 10M, not {text}.")


def work(options: argparse.Namespace) -> None:
    """Write the configuration, and print what it is based on."""
    refuse_low(options, "minutes", "params")
    target = options.to or Path(f"{_name(options.data)}.yaml")
    corpus, machine = look(options.data), find_machine()
    if target.exists():
        there = load_config(target, check=False)
        known = {path for source in there.shard.sources for path in getattr(source, "paths", ())}
        if any(known.intersection(own["paths"]) for own in corpus.sources.values()):
            raise UserError(f"{target} is there already, and reads {options.data}. Give another name with --to, or "
                            f"remove it.")
        print(_remarks(corpus) + _sources(corpus, there.source_names), end="")
        raise UserError(f"{target} is there already, and is not changed. To train on {options.data} too, put the lines "
                        f"above at the end of `sources:` in its section `shard:`. If it was run before, give it "
                        f"another `name:`. For a configuration of its own, give another file with --to.")
    rate = training_rate(machine)
    ranks = 1 if machine.gpus else min(MOST_RANKS, 2 ** int(math.log2(machine.cores)))
    proposal = propose(corpus, rate, options.minutes, options.params, ranks)
    own = _name(target.with_suffix(""))
    name = _free(own, lambda one: Path("runs", one).exists())
    write_text(target, as_yaml(corpus, proposal, name))
    others = OTHER_S + OTHER_MB_S * corpus.text_bytes / 1e6 / machine.cores
    if corpus.left_out:
        more = len(corpus.left_out) - MOST_LEFT_OUT
        echo("left out:", *(f"  {own}" for own in corpus.left_out[:MOST_LEFT_OUT]),
             *[f"  and for {counted(more, 'more reason')}, which {target} has"] * (more > 0))
    for remark in corpus.remarks:
        echo(remark)
    if name != own:
        echo(f"runs/{own} is there already, so this run is called {name}")
    if options.params is not None:
        echo(f"of the shapes that are proposed, {tokens_text(proposal.shape.parameter_count)} is next to "
             f"{tokens_text(options.params)}; --params leaves the time free, see below")
    note = "  # here; for Slurm's nodes see docs/slurm-quick-start.md" if shutil.which("sbatch") else ""
    echo(f"{counted(corpus.files, 'file')}, {corpus.text_bytes / 1e6:,.1f} MB of text, about "
         f"{tokens_text(proposal.corpus_tokens)} tokens\n"
         f"{tokens_text(proposal.shape.parameter_count)} parameters, {tokens_text(proposal.tokens)} tokens "
         f"({proposal.epochs}), {proposal.steps:,} steps: about {duration(proposal.seconds(rate))} of training here, "
         f"and {duration(others)} of the other stages, if nothing else runs\n"
         f"expected: {proposal.expected(corpus.gzip_bits)}\n"
         f"{target} is written. Read it, then:\n"
         f"  drover run {shlex.quote(str(target))} --cluster local{note}\n"
         f"  drover chat {name} --interactive")


def training_rate(machine: Machine) -> float:
    """FLOP/s at which a machine trains, about."""
    return machine.gpus * GPU_FLOPS or CPU_SHARE * machine.cores * matrix_rate()


def matrix_rate() -> float:
    """FLOP/s of a core in small float32 products, without importing torch.

    The best of many, in processor time, which other programs change little: what the core can, not what is free now.
    """
    import numpy as np

    left = np.full((SIZE, SIZE), 0.5, dtype=np.float32)
    best = 0.0
    began = time.perf_counter()
    while not best or time.perf_counter() - began < TEST_S:
        start = time.process_time()
        for _ in range(PRODUCTS):
            left @ left
        best = max(best, PRODUCTS * 2 * SIZE**3 / max(1e-9, time.process_time() - start))
    return best


def validation_share(corpus: Corpus) -> float:
    """The share of the text that is held out: some 2 MB, with two digits."""
    return float(f"{min(0.05, max(0.001, 2e6 / corpus.text_bytes)):.2g}")


def propose(corpus: Corpus, flops: float, minutes: float, params: int | None, ranks: int = 1) -> Proposal:
    """A model and its training, from the text and the FLOP/s. `params`, if given, replaces the minutes."""
    def trained(step: ModelConfig, tokens: float | None) -> Proposal:
        """On so many tokens; None: as many as the minutes allow. Never on too many of the text."""
        blocks = step.with_vocabulary(BYTES).non_embedding_parameter_count
        most = min(32768, max(1024, MOST_EMBEDDING * blocks / step.dim), math.sqrt(2 * corpus.text_bytes), corpus.ids)
        vocabulary = max(BYTES, 2 ** int(math.log2(most)))
        token_bytes = 1.0 if vocabulary == BYTES else 0.37 * math.log2(vocabulary) - 1.5  # as measured
        text = 1 + int(corpus.text_bytes / token_bytes)
        shape = step.with_vocabulary(vocabulary)
        most_tokens = int(ROOM * EPOCHS * text)
        made = Proposal(shape, text, most_tokens, token_bytes, ranks, validation_share(corpus))
        for _ in range(5 if tokens is None else 1):  # the length and the batch depend on the tokens
            allowed = made.wanted * (60 * minutes - START_S) / (made.seconds(flops) - START_S)
            used = int(max(1, min(allowed if tokens is None else tokens, most_tokens)))
            length = 1024 if used >= 20e6 else 512 if used >= 4e6 else 256
            made = replace(made, shape=shape.model_copy(update={"context_length": length}), wanted=used)
        return made

    if params is not None:
        return min((trained(step, CHINCHILLA * params) for step in LADDER),
                   key=lambda made: abs(math.log(made.shape.parameter_count / params)))
    return min((trained(step, None) for step in LADDER),
               key=lambda made: abs(math.log(made.tokens / made.shape.parameter_count / CHINCHILLA)))


def as_yaml(corpus: Corpus, proposal: Proposal, name: str) -> str:
    """The configuration, each choice with its reason."""
    shape, steps = proposal.shape, proposal.steps
    lr = 0.01 if proposal.muon else 0.003239 - 0.0001395 * math.log(shape.non_embedding_parameter_count)  # LR_LAW
    few = corpus.files < FEW_DOCUMENTS
    validation_tokens = min(65536, max(1024, int(VALIDATION * 0.75 * proposal.tokens / len(corpus.sources))))
    rule = ("tail   # few files: the end of each source, its last files by name; scores are of these alone" if few else
            "hash")
    prompts = corpus.prompts or ["The "]
    least = max(0.01 * corpus.sampled, PAGES_REJECTED * corpus.has_pages)
    allowed = min(1.0, max(least, math.ceil(2000 * corpus.rejected_share) / 1000))
    rejected = (f"  max_rejected_share: {allowed:g}   # twice what was broken ({corpus.rejected_share:.2%}), more for "
                f"pages, or if not all was looked at\n") * (allowed > ShardConfig().max_rejected_share)
    short_of_text = proposal.wanted >= int(ROOM * EPOCHS * proposal.corpus_tokens)
    size = f"vocab_size: {shape.vocab_size}   # up to the root of twice the text's bytes; fewer where words are few"
    vocabulary = ("kind: byte   # too little text, or too few words, for a vocabulary of its own"
                  if shape.vocab_size == BYTES else
                  f"kind: bpe   # the text has many characters; rare ones are spelled in bytes\n  {size}"
                  if FOR_CHARACTERS * corpus.characters > (shape.vocab_size or 0) else size)
    lacking = absent("near_duplicates", "rensa")
    cleaning = CLEANING.format(
        "# " if lacking else "", *lacking or ["of pages that are nearly equal one is kept"]) if corpus.crawled else ""
    launch = ("\nlaunch:\n  processes: "
              f"{proposal.ranks}   # ranks on this machine's cores; faster than one rank with as many threads\n"
              if proposal.ranks > 1 else "")
    return f"""\
# Proposed for {counted(corpus.files, "file")} with {corpus.text_bytes / 1e6:,.1f} MB of text. Change what you know \
better.
{_remarks(corpus)}name: {_quoted(name)}

shard:
  sources:
{_sources(corpus)}\
  shard_mb: {min(64.0, max(1.0, round(corpus.text_bytes / 8e6, 1)))}   # several shards for each process
  validation_share: {proposal.validation}
  validation_rule: {rule}
{rejected}{cleaning}\

tokenizer:
  {vocabulary}
{f"  train_mb: {TRAIN_MB:g}{chr(10)}" if corpus.text_bytes > TRAIN_MB * 1e6 else ""}\

# {proposal.tokens / shape.parameter_count:.2g} tokens for each parameter; {CHINCHILLA} use compute best (Hoffmann \
et al. 2022){f", but would be more than {ROOM * EPOCHS:.1f} epochs of the text" if short_of_text else ""}.
model:   # {tokens_text(shape.parameter_count)} parameters
  dim: {shape.dim}
  layers: {shape.layers}
  heads: {shape.heads}
  kv_heads: {shape.kv_heads}
{f"  ffn_dim_multiplier: {shape.ffn_dim_multiplier}{chr(10)}" if shape.ffn_dim_multiplier else ""}\
  multiple_of: {shape.multiple_of}
  context_length: {shape.context_length}
  rope_theta: {shape.rope_theta}
  tied_embeddings: true

# Expected: {proposal.expected(corpus.gzip_bits)}.
# gzip -9 needs {corpus.gzip_bits:.2f}.
train:   # {tokens_text(proposal.tokens)} tokens, {proposal.epochs}; above {EPOCHS} epochs repeated text teaches little
  steps: {steps}
  sequence_length: {shape.context_length}
  batch_tokens: {proposal.batch_tokens}   # about a 400th of all, as a power of two; from 8 sequences to {MOST_BATCH}
  micro_batch: {proposal.micro_batch}   # sequences of a rank at once
  optimizer: {'muon' if proposal.muon else 'adamw'}
  lr: {lr:.2g}   # {"measured on a model of 3M parameters (benchmarks/RESULTS.md)" if proposal.muon else LR_LAW}
  warmup_steps: {max(1, steps // 20)}
  validation_every: {max(1, steps // 4)}
  validation_tokens: {validation_tokens}   # of each source: a twentieth of the time
  sample_every: {max(1, steps // 2)}
  prompts: {_flow(prompts)}
  checkpoint: {{every_steps: {max(1, steps // 4)}}}

evaluate:
  prompts: {_flow(prompts)}
{launch}"""


def _remarks(corpus: Corpus) -> str:
    """What is left out, and what to know, as comments."""
    return "".join(f"# {' '.join(printable(own).split())}\n" for own in (
        *(f"left out: {own}" for own in corpus.left_out), *corpus.remarks))


def _sources(corpus: Corpus, taken: Sequence[str] = ()) -> str:
    """A source for each kind of files, called after the file or folder; its paths are absolute, and each has a line.
    Where two would have one name, the kind's field and encoding follow. taken: names that others have."""
    sources: dict[str, dict[str, Any]] = {name: {} for name in taken}
    for kind, patterns in corpus.sources.items():
        place = corpus.places[kind]
        field = f"{kind.text_field or ('other' if kind.format else 'text')}-{kind.encoding}".removesuffix("-utf-8")
        own = place.name if place.is_dir() else place.name.partition(".")[0]
        base, longer = (re.sub("[^A-Za-z0-9_]+", "-", _ascii(text))[:60].strip("-") or "mine" for text in (
            own, f"{own}-{field}"))
        name = _free(longer if base in sources else base, sources.__contains__)
        sources[name] = {"kind": "files", "name": name, **kind.settings(), **patterns}
    return textwrap.indent(yaml.dump([*filter(None, sources.values())], Dumper=Dumper, sort_keys=False,
                                     allow_unicode=True, width=math.inf), "    ")


def _flow(texts: list[str]) -> str:
    return f"[{', '.join(map(_quoted, texts))}]"


def _quoted(text: str) -> str:
    """A text in YAML, whatever is in it: JSON's form."""
    return json.dumps(text, ensure_ascii=False)


def _name(folder: Path) -> str:
    """A run's name from a folder's."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", _ascii(folder.resolve().name))[:100].strip("-._") or "mine"


def _ascii(name: str) -> str:
    """A name with umlauts and the like written out and accents left out."""
    text = unicodedata.normalize("NFC", name).translate(LETTERS)
    return "".join(letter for letter in unicodedata.normalize("NFKD", text) if not unicodedata.combining(letter))


main = Program("python -m drover.tools.init", __doc__, add_options, work)

if __name__ == "__main__":
    sys.exit(main())
