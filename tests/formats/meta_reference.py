"""Meta's form, written for the tests alone: how a model is cut into parts, and the forward pass over the parts.

It follows the description of llama-models (the table of reshard_mp, complex rotation of adjacent pairs, a sum over the
parts after wo and w2) and shares nothing with `pipeline` and `model`: it works on the tensors that lie in the files.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = ("wq", "wk", "wv", "w1", "w3", "output")
COLUMNS = ("wo", "w2")


def parts_of(state: dict[str, Tensor], parts: int, kv_heads: int, embedding_columns: bool) -> list[dict[str, Tensor]]:
    """A state dict by Meta's names, cut up."""
    found: list[dict[str, Tensor]] = [{} for _ in range(parts)]
    for name, tensor in state.items():
        kind = name.split(".")[-2]
        if kind in ("wk", "wv") and parts > kv_heads:
            heads = tensor.chunk(kv_heads)
            pieces = [heads[part * kv_heads // parts] for part in range(parts)]
        elif kind in ROWS or (kind == "tok_embeddings" and not embedding_columns):
            pieces = list(tensor.chunk(parts, dim=0))
        elif kind in COLUMNS or kind == "tok_embeddings":
            pieces = list(tensor.chunk(parts, dim=1))
        else:
            pieces = [tensor] * parts
        for part, piece in zip(found, pieces, strict=True):
            part[name] = piece.clone()
    return found


def write_folder(folder: Path, parts: list[dict[str, Tensor]], params: dict) -> Path:
    folder.mkdir(parents=True)
    (folder / "params.json").write_text(json.dumps(params))
    for number, part in enumerate(parts):
        torch.save(part, folder / f"consolidated.{number:02d}.pth")
    return folder


def read_folder(folder: Path) -> tuple[list[dict[str, Tensor]], dict]:
    return ([torch.load(path, weights_only=True) for path in sorted(folder.glob("consolidated.*.pth"))],
            json.loads((folder / "params.json").read_text()))


def logits(parts: list[dict[str, Tensor]], params: dict, tokens: Tensor) -> Tensor:
    """(length,) tokens -> (length, vocabulary), in float32."""
    count, heads, epsilon = len(parts), params["n_heads"], params["norm_eps"]
    kv_heads = params.get("n_kv_heads") or heads
    size = params["dim"] // heads
    turns = rotations(size, len(tokens), params.get("rope_theta", 10000.0), params.get("use_scaled_rope", False))
    x = embed(parts, params["dim"], tokens)
    for layer in range(params["n_layers"]):
        h = normed(x, parts[0][f"layers.{layer}.attention_norm.weight"], epsilon)
        total = torch.zeros_like(x)
        for part in parts:
            q, k, v = (F.linear(h, part[f"layers.{layer}.attention.{name}.weight"].float()).unflatten(1, (-1, size))
                       for name in ("wq", "wk", "wv"))
            assert q.shape[1] == heads // count and k.shape[1] == kv_heads // count
            q, k = turned(q, turns), turned(k, turns)
            k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for each in (k, v))
            out = F.scaled_dot_product_attention(*(each.transpose(0, 1) for each in (q, k, v)), is_causal=True)
            total += F.linear(out.transpose(0, 1).flatten(1), part[f"layers.{layer}.attention.wo.weight"].float())
        x = x + total
        h = normed(x, parts[0][f"layers.{layer}.ffn_norm.weight"], epsilon)
        w1, w2, w3 = ([part[f"layers.{layer}.feed_forward.{name}.weight"].float() for part in parts]
                      for name in ("w1", "w2", "w3"))
        x = x + sum(F.linear(F.silu(F.linear(h, a)) * F.linear(h, c), b) for a, b, c in zip(w1, w2, w3, strict=True))
    x = normed(x, parts[0]["norm.weight"], epsilon)
    return torch.cat([F.linear(x, part["output.weight"].float()) for part in parts], dim=1)


def embed(parts: list[dict[str, Tensor]], dim: int, tokens: Tensor) -> Tensor:
    matrices = [part["tok_embeddings.weight"].float() for part in parts]
    if len(parts) > 1 and matrices[0].shape[1] != dim:  # cut along the columns
        return torch.cat([matrix[tokens] for matrix in matrices], dim=1)
    height, found = matrices[0].shape[0], torch.zeros(len(tokens), dim)
    for number, matrix in enumerate(matrices):
        mine = tokens // height == number
        found[mine] = matrix[tokens[mine] - number * height]
    return found


def normed(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon) * weight.float()


def rotations(size: int, length: int, theta: float, scaled: bool) -> Tensor:
    """(length, size / 2) complex."""
    frequencies = []
    for pair in range(size // 2):
        frequency = theta ** (-2 * pair / size)
        wavelength = 2 * math.pi / frequency
        if scaled and wavelength > 8192:
            frequency /= 8
        elif scaled and wavelength > 8192 / 4:
            smooth = (8192 / wavelength - 1) / 3
            frequency = (1 - smooth) * frequency / 8 + smooth * frequency
        frequencies.append(frequency)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), torch.tensor(frequencies, dtype=torch.float64))
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64)


def turned(x: Tensor, turns: Tensor) -> Tensor:
    """Adjacent pairs of (length, heads, size) as complex numbers, turned."""
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns[:, None]).flatten(2)
