"""Text generation with a key-value cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from samestep.errors import ConfigError
from samestep.model.attention import KeyValueCache
from samestep.model.decoder import Decoder


@torch.no_grad()
def generate(
    model: Decoder,
    prompt_ids: list[int],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    end_id: int | None = None,
) -> Iterator[int]:
    """Yield new token ids one by one; stops after `max_new_tokens` or at `end_id`.

    Where the model has no position left, the later half of what it sees is read again from position 0.

    Args:
        prompt_ids: at least one token; of a prompt longer than the model's positions only the end is read.
        temperature: 0 takes the likeliest token (greedy).
        top_k: sample among the k likeliest.
        top_p: sample among the likeliest whose probabilities reach p together (Holtzman et al. 2020).

    Raises:
        ConfigError: an argument out of range, or an empty prompt.
    """
    _check(prompt_ids, temperature, top_k, top_p, max_new_tokens)
    generator = torch.Generator(device=model.device).manual_seed(seed)
    model.eval()
    positions = model.spec.max_positions
    cache = KeyValueCache()
    seen = list(prompt_ids[-positions:])
    unread = seen
    for _ in range(max_new_tokens):
        if cache.length + len(unread) > positions:
            cache = KeyValueCache()
            seen = seen[-max(1, positions // 2) :]
            unread = seen
        logits = model.decode(torch.tensor([unread], device=model.device), cache)[0]
        token = int(_sample(logits, temperature, top_k, top_p, generator))
        if token == end_id:
            return
        yield token
        seen = [*seen, token]
        unread = [token]


def _check(
    prompt_ids: list[int], temperature: float, top_k: int | None, top_p: float | None, max_new_tokens: int
) -> None:
    if not prompt_ids:
        raise ConfigError("the prompt is empty", fix="write at least one character")
    if temperature < 0:
        raise ConfigError(f"temperature {temperature} is negative", fix="write 0 for greedy, or a positive number")
    if top_k is not None and top_k < 1:
        raise ConfigError(f"top_k {top_k} leaves no token", fix="write 1 or more")
    if top_p is not None and not 0 < top_p <= 1:
        raise ConfigError(f"top_p {top_p} is no probability", fix="write a number above 0, at most 1")
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens {max_new_tokens} asks for nothing", fix="write 1 or more")


def _sample(
    logits_V: torch.Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator
) -> torch.Tensor:
    if temperature == 0:
        return logits_V.argmax()
    logits_V = logits_V / temperature
    if top_k is not None and top_k < len(logits_V):
        logits_V = logits_V.masked_fill(logits_V < logits_V.topk(top_k).values[-1], -torch.inf)
    probabilities_V = logits_V.softmax(-1)
    if top_p is not None:
        ordered, places = probabilities_V.sort(descending=True)
        beyond = ordered.cumsum(-1) - ordered >= top_p  # the token that crosses the border stays
        probabilities_V = probabilities_V.scatter(0, places[beyond], 0.0)
    return torch.multinomial(probabilities_V, 1, generator=generator)
