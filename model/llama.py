"""The Llama decoder with Meta's parameter names, and the initial values of its parameters."""

import hashlib
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drover.model.attention.backend import Backend, Documents
from drover.model.attention.module import PLAIN, Attention, Cache, Layout
from drover.model.attention.sdpa import dense_mask
from drover.model.config import ModelConfig
from drover.model.linear import Linear
from drover.model.loss import Losses, wide
from drover.model.rope import RotaryTable


class Embedding(nn.Embedding):
    """torch's embedding. It draws nothing on the meta device, for which torch would import its compiler (1.7 s)."""

    def reset_parameters(self) -> None:
        """Draw torch's own weights, except on the meta device."""
        if not self.weight.is_meta:
            super().reset_parameters()


class FeedForward(nn.Module):
    """SwiGLU (Shazeer, 2020): w2(silu(w1 x) * w3 x), without biases."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.w1 = Linear(config.dim, config.hidden)
        self.w2 = Linear(config.hidden, config.dim)
        self.w3 = Linear(config.dim, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """(..., dim) -> (..., dim)."""
        return self.w2(swiglu(self.w1(x), self.w3(x)))


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """The input of w2, from the outputs of w1 and w3: (..., hidden) each."""
    return F.silu(gate) * up


class Block(nn.Module):
    """Attention and feed-forward, each with a norm before and added to the residual stream after."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.feed_forward = FeedForward(config)
        # nn.RMSNorm computes in float32 inside and returns its input's dtype. Fused, it takes 1.5 ms, against 3.8 ms
        # with separate operators (2,048 x 288, forward + backward, 2 CPU threads).
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)

    def forward(self, x: Tensor, layout: Layout, cache: Cache | None = None) -> Tensor:
        """x: (batch, length, dim) -> the same; the other arguments go to `Attention`."""
        h = x + self.attention(self.attention_norm(x), layout, cache)
        return h + self.feed_forward(self.ffn_norm(h))


@dataclass(frozen=True)
class ModelPart:
    """Consecutive layers of a network. The first part also has the embedding, the last part norm and output matrix.

    layers: their numbers in the whole network. total: the number of its layers.
    """

    layers: range
    total: int

    @property
    def embeds(self) -> bool:
        """Whether it begins with tokens."""
        return self.layers.start == 0

    @property
    def predicts(self) -> bool:
        """Whether it ends with logits or losses."""
        return self.layers.stop == self.total


class Blocks(nn.ModuleList):
    """Blocks under their numbers in the whole network, so that a part's parameters have the same names. Iterate over
    them: an index is the block's number only if all blocks are there."""

    def __init__(self, config: ModelConfig, layers: range) -> None:
        super().__init__()
        for layer in layers:
            self.add_module(str(layer), Block(config))


class ModelOutput(Linear):
    """The output matrix. Use its weight only inside a call of it, because FSDP2 all-gathers the weight for calls."""

    def forward(self, x: Tensor, loss: Callable[[Tensor, Tensor], Tensor] | None = None) -> Tensor:
        """(..., dim) -> (..., vocabulary), or the result of `loss(x, weight)`."""
        return super().forward(x) if loss is None else loss(x, self.weight)


class Llama(nn.Module):
    """Decoder-only transformer (Touvron et al., 2023; Llama 3: Grattafiori et al., 2024).

    A new model has no meaningful weights: call `initialise`, or load a state dict. Building it under
    `torch.device("meta")` costs nothing. Raises ValueError with everything that is wrong with the config.

    Args:
        part: builds only these layers; `hidden` is the output of those before. With tied embeddings the last part has
            the embedding too, as its output matrix.

    Attributes:
        backend: computes attention inside documents. By default the dense mask, which runs everywhere; set it to the
            choice of `drover.model.attention.backend.choose`.
    """

    backend: Backend = PLAIN

    def __init__(self, config: ModelConfig, part: ModelPart | None = None) -> None:
        problems = config.problems()
        if config.vocab_size is None:
            problems.append("vocab_size is None: take it from the tokenizer first.")
        if problems:
            raise ValueError("This model cannot be built: " + " ".join(problems))
        assert config.vocab_size is not None
        super().__init__()
        self.config = config
        self.part = part = part or ModelPart(range(config.layers), config.layers)
        if part.embeds or (part.predicts and config.tied_embeddings):
            self.tok_embeddings = Embedding(config.vocab_size, config.dim)
        self.layers = Blocks(config, part.layers)
        if part.predicts:
            self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
            self.output = ModelOutput(config.dim, config.vocab_size)
        self.rotary_table = RotaryTable(config)
        self.losses = Losses()
        self.tie()

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        *,
        hidden: Tensor | None = None,
        documents: Tensor | None = None,
        document_lengths: Sequence[int] | None = None,
        positions: Tensor | None = None,
        caches: Sequence[Cache] | None = None,
        mask: Tensor | None = None,
        last_only: bool = False,
        reduction: Literal["sum", "none"] = "sum",
    ) -> Tensor:
        """Logits, or the loss if there are labels. The loss never holds all logits.

        tokens: (batch, length) int64. labels: the same shape, the target token at each position, -100 for none. hidden:
        (batch, length, dim), the output of the layers before this `part`; without it the part begins with the
        embedding.
        documents: (batch, length) ints; neighbours with the same number are a document, whose tokens see its earlier
        tokens only. document_lengths: in tokens, row after row; without them the host waits for a GPU if the backend
        needs them. positions: (batch, length) int64 for the rotary embedding, 0, 1, 2 ... by default. caches: one per
        layer, extended in place; the tokens continue theirs. mask: (batch or 1, 1, length, keys), added to the scores
        of attention instead of the causal mask, for caches with rows of unequal length. last_only: without labels, only
        the logits of each row's last token, (batch, 1, vocabulary).

        Returns the next part's `hidden`, (batch, length, dim), if this is not the last part. Otherwise, without labels,
        logits (batch, length, vocabulary). With labels, in nats: the sum over all targets as a scalar ("sum"; the
        caller divides by its global number of targets), or each target's loss without gradient, (batch, length), 0 if
        there is none ("none", for evaluation). Always float32, or float64 in a float64 model. Raises ValueError for
        sequences longer than context_length.
        """
        assert labels is None or not last_only, "a loss needs all tokens"
        assert mask is None or caches is not None, "without caches, documents decide which tokens see which"
        assert documents is None or caches is None, "a cache holds one document"
        assert labels is None or labels.shape == tokens.shape, (labels.shape, tokens.shape)
        assert documents is None or documents.shape == tokens.shape, (documents.shape, tokens.shape)
        assert caches is None or len(caches) == self.config.layers, "give one cache for each layer"
        start = caches[self.part.layers.start].length if caches else 0
        end = start + tokens.shape[1]
        if end > self.config.context_length:
            raise ValueError(f"The sequence has {end} tokens; context_length is {self.config.context_length}.")
        h = self.tok_embeddings(tokens) if hidden is None else hidden  # (batch, length, dim)
        exact = wide(h.dtype)
        if positions is None:
            positions = torch.arange(start, end, device=tokens.device).unsqueeze(0)
        rotation = self.rotary_table.at(positions, exact)
        if documents is None:
            if mask is None and start > 0 and tokens.shape[1] > 1:  # else torch's causal kernel, or one query sees all
                mask = dense_mask(tokens.shape[1], start, None, tokens.device, h.dtype)
            layout = Layout(rotation, prepared=mask)
        else:
            prepared = self.backend.prepare(Documents(documents, document_lengths), h.dtype)
            layout = Layout(rotation, self.backend, prepared)
        for index, layer in zip(self.part.layers, self.layers, strict=True):
            h = layer(h, layout, caches[index] if caches else None)
        if not self.part.predicts:
            return h
        h = self.norm(h[:, -1:] if last_only else h)
        if labels is None:
            return self.output(h).to(exact)
        lose = self.losses.total if reduction == "sum" else self.losses.each
        return self.output(h, loss=partial(lose, labels=labels))

    def _apply(self, fn: Any, recurse: bool = True) -> "Llama":
        # Moving a model off the meta device (to_empty) creates new parameters module by module, which would
        # silently untie the two matrices.
        super()._apply(fn, recurse)
        self.tie()
        return self

    def tie(self) -> None:
        """Tie the output matrix to the embedding again after one of them was replaced, if the config ties them."""
        if self.config.tied_embeddings and self.part.predicts:
            self.output.weight = self.tok_embeddings.weight


CUT = math.erf(3 / math.sqrt(2))
"""The share of a normal distribution within 3 standard deviations. We invert the distribution ourselves, because
torch's truncated normal draws different numbers in different versions."""

BLOCK_VALUES = 2**20
"""Initial values per generator: a rank draws only the blocks of rows that it holds."""

CHUNK_VALUES = 2**14
"""How many values are computed at once: they fit into a processor's cache."""


def initial_value(
    name: str, shape: Sequence[int], config: ModelConfig, seed: int, rows: range | None = None, workers: int = 1
) -> Tensor:
    """The parameter's initial value, or only some of its rows: float32, on the CPU. workers: threads that draw.

    It depends on the arguments only. Each block of rows has a generator seeded by the SHA-256 of seed, name and block
    number, so neither ranks, order nor sharding matter. Meta has not published its scheme. This is GPT-2's, with
    smaller values for the matrices that write to the residual stream:

    - embedding, wq, wk, wv, w1, w3: normal, standard deviation 0.02
    - wo, w2: 0.02 / sqrt(2 * layers), because that many of them add up
    - output: dim**-0.5, so that initial logits are of order 1
    - norms: 1

    Normals are cut at 3 standard deviations. Raises ValueError for a name that is not a Llama's.
    """
    rows = range(shape[0]) if rows is None else rows
    value = torch.empty(len(rows), *shape[1:], dtype=torch.float32, device="cpu")
    match name.split(".")[-2:]:
        case ["attention_norm" | "ffn_norm" | "norm", "weight"]:
            return value.fill_(1)
        case ["tok_embeddings" | "wq" | "wk" | "wv" | "w1" | "w3", "weight"]:
            deviation = 0.02
        case ["wo" | "w2", "weight"]:
            deviation = 0.02 / (2 * config.layers) ** 0.5
        case ["output", "weight"]:
            deviation = config.dim**-0.5
        case _:
            raise ValueError(f"There is no parameter {name!r} in a Llama.")
    height = max(1, BLOCK_VALUES // math.prod(shape[1:]))  # rows of a block

    def draw(start: int) -> None:
        """Draw the rows of the block that begins with row `start`. Rows before the requested ones are drawn and
        dropped."""
        first, last = max(start, rows.start), min(start + height, rows.stop)
        digest = hashlib.sha256(f"{seed} {name} {start // height}".encode()).digest()
        generator = torch.Generator(device="cpu").manual_seed(int.from_bytes(digest[:8], "big", signed=True))
        skipped = (first - start) * math.prod(shape[1:])
        scratch = torch.empty(min(skipped, CHUNK_VALUES), dtype=torch.float32, device="cpu")
        for done in range(0, skipped, CHUNK_VALUES):
            scratch[: skipped - done].uniform_(-CUT, CUT, generator=generator)
        for part in value[first - rows.start : last - rows.start].view(-1).split(CHUNK_VALUES):
            part.uniform_(-CUT, CUT, generator=generator).erfinv_().mul_(deviation * math.sqrt(2))

    starts = range(rows.start // height * height, rows.stop, height) if len(rows) else range(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # chunks are too small for torch's own threads, which would mostly wait for each other
    try:
        with ThreadPoolExecutor(max(1, min(workers, len(starts)))) as pool:
            list(pool.map(draw, starts))
    finally:
        torch.set_num_threads(threads)
    return value


@torch.no_grad()
def initialise(model: Llama, config: ModelConfig, seed: int) -> None:
    """Give every parameter of an unsharded model its `initial_value`."""
    for name, parameter in model.named_parameters():
        parameter.copy_(initial_value(name, parameter.shape, config, seed))
