"""Text generation with a key-value cache."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from samestep.errors import CheckpointError, ConfigError
from samestep.model.attention import KeyValueCache
from samestep.model.decoder import Decoder


def generate(
    model: Decoder,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    end_id: int | None = None,
    token_count: int | None = None,
) -> Iterator[int]:
    """New token ids one by one; ends after `max_new_tokens`, or before `end_id`. Nothing is dropped out.

    Where the model has no position left, the later half of what it sees is read again from position 0.

    Args:
        prompt_ids: at least one token; of a prompt longer than the model's positions only the end is read.
        temperature: what logits are divided by; 0 takes the likeliest token (greedy).
        top_k: sample among the k likeliest.
        top_p: sample among the likeliest (of `top_k`) whose probabilities reach p together (Holtzman et al. 2020).
        token_count: tokens of the tokenizer; rows of the model's output beyond them mean nothing and are never chosen.
        seed: of the sampling; equal seeds give equal tokens on one device.

    Raises:
        ConfigError: an argument out of range, or a prompt that is empty or not in the vocabulary; at once, before the
            first token is asked for.
        CheckpointError: the weights give logits that are not finite.
    """
    _check(prompt_ids, model.spec.vocab_size, temperature, top_k, top_p, max_new_tokens)
    return _tokens(model, list(prompt_ids), max_new_tokens, temperature, top_k, top_p, seed, end_id, token_count)


@torch.no_grad()
def _tokens(
    model: Decoder,
    prompt_ids: list[int],
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int,
    end_id: int | None,
    token_count: int | None,
) -> Iterator[int]:
    generator = torch.Generator(model.device).manual_seed(seed)
    positions = model.spec.max_positions
    cache = KeyValueCache()
    seen = unread = prompt_ids[-positions:]
    for _ in range(max_new_tokens):
        if len(seen) > positions:
            cache = KeyValueCache()
            seen = unread = seen[-max(1, positions // 2) :]
        logits_V = model.decode(torch.tensor([unread], device=model.device), cache)[0]
        if not logits_V.isfinite().all():
            raise CheckpointError(
                "the model gives logits that are not finite: training has diverged\n  fix: use an earlier checkpoint"
            )
        token = int(_sample(logits_V[:token_count], temperature, top_k, top_p, generator))
        if token == end_id:
            return
        yield token
        seen, unread = [*seen, token], [token]


def _check(
    prompt_ids: Sequence[int],
    vocab_size: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    max_new_tokens: int,
) -> None:
    if not len(prompt_ids):
        raise ConfigError("the prompt is empty", fix="write at least one character")
    for token in prompt_ids:
        if not 0 <= token < vocab_size:
            raise ConfigError(f"token {token} of the prompt is outside the model's vocabulary of {vocab_size}")
    if not 0 <= temperature < math.inf:
        raise ConfigError(f"temperature {temperature} is out of range", fix="write 0 for greedy, or a positive number")
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
    # float64, and the largest logit at 0: no temperature overflows, and a long tail of small probabilities adds up.
    ordered_K, tokens_K = logits_V.double().topk(min(top_k or len(logits_V), len(logits_V)))
    probabilities_K = ((ordered_K - ordered_K[0]) / temperature).softmax(-1)
    if top_p is not None:
        reached_K = probabilities_K.cumsum(-1) - probabilities_K
        probabilities_K = probabilities_K[reached_K < top_p]  # the token that crosses the border stays
    return tokens_K[torch.multinomial(probabilities_K, 1, generator=generator)]
