"""Meta's form, written for the tests alone: how a model is cut into parts.

It follows the description of llama-models (the table of reshard_mp) and shares nothing with `pipeline` and `model`.
"""

from __future__ import annotations

import json

import torch
from torch import Tensor

ROWS = ("wq", "wk", "wv", "w1", "w3", "output")
COLUMNS = ("wo", "w2")


def parts_of(state, parts, kv_heads, embedding_columns):
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


def write_folder(folder, parts, params):
    folder.mkdir(parents=True)
    (folder / "params.json").write_text(json.dumps(params))
    for number, part in enumerate(parts):
        torch.save(part, folder / f"consolidated.{number:02d}.pth")
    return folder


def read_folder(folder):
    return ([torch.load(path, weights_only=True) for path in sorted(folder.glob("consolidated.*.pth"))],
            json.loads((folder / "params.json").read_text()))
