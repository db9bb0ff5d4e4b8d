"""Sampling from a model, one prompt after the other."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from model.attention import KeyValueCache
from model.llama import Llama


def generate(
    model: Llama,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    temperature: float,
    top_p: float,
    top_k: int | None = None,
    seed: int,
    stop_ids: Collection[int],
    use_cache: bool = True,
    multiple_of: int = 1,
) -> list[list[int]]:
    """Continue each prompt by up to max_new_tokens; returns only the new tokens, without the one that stopped
    it.

    temperature 0 takes the most likely token; otherwise logits are divided by it, cut to the top_k most
    likely if given and to the smallest set whose probabilities reach top_p (1 keeps all), and drawn from.
    Prompt i draws from its own generator, seeded by seed + i: its text does not depend on its neighbours, and
    torch's global generator is left alone. use_cache=False recomputes everything for each token; the result
    is the same but for rounding. multiple_of: without a cache, sequences are padded at their end to multiples of
    this length, for models that are split along the sequence. Raises ValueError for settings out of range, and
    for prompts that are empty or too long, FloatingPointError where the model's scores are no numbers.
    """
    assert multiple_of == 1 or not use_cache, "a cache would take the padding for text"
    _check_settings(max_new_tokens, temperature, top_p, top_k)
    for index, prompt in enumerate(prompts):
        _check_prompt(model, index, prompt, max_new_tokens)
    was_training = model.training
    model.eval()
    try:
        results = []
        for index, prompt in enumerate(prompts):
            generator = torch.Generator(device="cpu").manual_seed(seed + index)
            tokens: list[int] = []
            scores = _Scores(model, prompt, max_new_tokens, use_cache, multiple_of)
            while len(tokens) < max_new_tokens:
                token = _draw(scores.next(tokens), temperature, top_p, top_k, generator)
                if token in stop_ids:
                    break
                tokens.append(token)
            results.append(tokens)
        return results
    finally:
        model.train(was_training)


class _Scores:
    """Logits of the next token, from a cache or from scratch."""

    def __init__(
        self, model: Llama, prompt: Sequence[int], max_new_tokens: int, use_cache: bool, multiple_of: int
    ) -> None:
        self.model = model
        self.multiple_of = multiple_of
        self.prompt = list(prompt)
        self.device = next(model.parameters()).device
        capacity = len(self.prompt) + max_new_tokens
        self.caches = [KeyValueCache(capacity) for _ in range(model.config.layers)] if use_cache else None

    @torch.no_grad()
    def next(self, generated: list[int]) -> Tensor:
        """(vocabulary,) on the CPU, for the token after the prompt and `generated`."""
        tokens = self.prompt + generated
        seen = self.caches[0].length if self.caches else 0
        new = tokens[seen:]
        padding = [0] * (-len(new) % self.multiple_of)  # no token sees a later one
        logits: Tensor = self.model(torch.tensor([new + padding], device=self.device), caches=self.caches)
        return logits[0, len(new) - 1].cpu()


def _draw(
    logits: Tensor, temperature: float, top_p: float, top_k: int | None, generator: torch.Generator
) -> int:
    if temperature == 0:
        return int(logits.argmax())
    probabilities, ids = torch.softmax(logits / temperature, dim=-1).sort(descending=True, stable=True)
    if probabilities.isnan().any():
        raise FloatingPointError("the model's scores are no numbers")
    if top_k is not None:
        probabilities = probabilities[:top_k] / probabilities[:top_k].sum()
    # A token stays while those before it have not reached top_p, so the most likely one always does.
    before = probabilities.cumsum(dim=-1) - probabilities
    probabilities = probabilities.masked_fill(before >= top_p, 0.0) if top_p < 1 else probabilities
    return int(ids[torch.multinomial(probabilities, 1, generator=generator)])


def _check_settings(max_new_tokens: int, temperature: float, top_p: float, top_k: int | None) -> None:
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must be at least 0, not {max_new_tokens}.")
    if temperature < 0:
        raise ValueError(f"temperature must be at least 0, not {temperature}.")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1, not {top_p}.")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be at least 1, not {top_k}.")


def _check_prompt(model: Llama, index: int, prompt: Sequence[int], max_new_tokens: int) -> None:
    vocabulary = model.config.vocab_size
    context = model.config.context_length
    assert vocabulary is not None
    if not prompt:
        raise ValueError(f"Prompt {index} is empty: give at least the token that begins a text.")
    if len(prompt) + max_new_tokens > context:
        raise ValueError(
            f"Prompt {index} has {len(prompt)} tokens; with {max_new_tokens} new ones it exceeds "
            f"the context_length of {context}."
        )
    if min(prompt) < 0 or max(prompt) >= vocabulary:
        raise ValueError(f"Prompt {index} has token ids outside 0 .. {vocabulary - 1}.")
