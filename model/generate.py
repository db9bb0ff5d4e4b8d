"""Sampling from a model, one prompt after the other; the model may be split over ranks.

`drover.model.generation` continues several prompts at once and streams their texts.
"""

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from drover.model.attention.module import KeyValueCache
from drover.model.generation.sampling import Sampling, draw
from drover.model.generation.stream import prompt_problem
from drover.model.llama import Llama


def generate(
    model: Llama,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    temperature: float,
    top_p: float,
    seed: int,
    stop_ids: Collection[int],
    use_cache: bool = True,
    multiple_of: int = 1,
    pulse: Callable[[], None] = lambda: None,
) -> list[list[int]]:
    """Continue each prompt by up to max_new_tokens. Returns only the new tokens, without the one that stopped it.

    temperature and top_p are those of `Sampling`. Prompt i has its own generator, seeded by seed + i. So its
    text does not depend on its neighbours, and torch's global generator is not used. use_cache=False recomputes
    everything for each token; the result is the same except for rounding. multiple_of: without a cache, sequences are
    padded at their end to multiples of this length, for models that are split along the sequence. pulse: called before
    each pass of the model. All ranks of a split model make the same passes. Raises ValueError for settings out of
    range, and for prompts that are empty or too long, FloatingPointError if the model's logits are NaN.
    """
    assert multiple_of == 1 or not use_cache, "a cache would treat the padding as text"
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must be at least 0, not {max_new_tokens}.")
    sampling = Sampling(temperature=temperature, top_p=top_p)
    for index, prompt in enumerate(prompts):
        if problem := prompt_problem(model, prompt, max_new_tokens):
            raise ValueError(f"Prompt {index} {problem}")
    was_training = model.training
    model.eval()
    try:
        results = []
        for index, prompt in enumerate(prompts):
            generator = torch.Generator(device="cpu").manual_seed(seed + index)
            tokens, most = list(prompt), len(prompt) + max_new_tokens
            caches = [KeyValueCache(most) for _ in range(model.config.layers)] if use_cache else None
            while len(tokens) < most:
                pulse()
                token = draw(_scores(model, tokens, caches, multiple_of), sampling, generator)
                if token in stop_ids:
                    break
                tokens.append(token)
            results.append(tokens[len(prompt):])
        return results
    finally:
        model.train(was_training)


@torch.no_grad()
def _scores(model: Llama, tokens: list[int], caches: list[KeyValueCache] | None, multiple_of: int) -> Tensor:
    """Logits of the token after `tokens`, (vocabulary,) on the CPU. caches: of the first tokens; None: from scratch."""
    seen = max(cache.length for cache in caches) if caches else 0  # a pipeline rank fills its own
    new = tokens[seen:]
    padding = [0] * (-len(new) % multiple_of)  # after the text, where no token sees it
    logits = model(torch.tensor([new + padding], device=next(model.parameters()).device), caches=caches)
    return logits[0, len(new) - 1].cpu()
