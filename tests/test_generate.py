"""Generation against the model run afresh for every token, and sampling against distributions made by hand."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from test_model import SPEC as USUAL
from test_model import copied, decoder, make_hf

from samestep.errors import CheckpointError, ConfigError
from samestep.model.attention import KeyValueCache
from samestep.run.generate import _sample, generate

F64 = torch.float64
# Large weights, so that the likeliest token depends on all that came before.
SPEC = replace(USUAL, initializer_range=0.3)
PROMPT = [5, 17, 80, 2]


def afresh(model, seen: list[int]) -> torch.Tensor:
    """Next-token logits [vocab] of what is seen, without a cache of earlier calls."""
    with torch.no_grad():
        return model.decode(torch.tensor([seen]), KeyValueCache())[0]


@pytest.mark.parametrize(
    "changes", [{}, {"num_heads": 6, "num_kv_heads": 1}, {"tied": True, "normalization": "LayerNorm"}]
)
def test_greedy_equals_the_model_run_afresh(changes):
    model = decoder(replace(SPEC, **changes), F64)
    got = list(generate(model, PROMPT, max_new_tokens=20, temperature=0))
    seen = list(PROMPT)
    for token in got:
        assert token == int(afresh(model, seen).argmax())
        seen.append(token)
    assert len(got) == 20
    assert len(set(got)) > 10


@pytest.mark.parametrize("split", [1, 2, 5, 8])
def test_a_cache_gives_the_logits_of_the_whole(split):
    model = decoder(SPEC, F64)
    ids = torch.arange(18).view(2, 9) % 11
    cache = KeyValueCache()
    with torch.no_grad():
        model.decode(ids[:, :split], cache)
        assert cache.length == split
        got = model.decode(ids[:, split:], cache)
        truth = model.decode(ids, KeyValueCache())
    assert cache.length == 9
    assert (got - truth).abs().max() <= 1e-12


@pytest.mark.parametrize("positions", [1, 2, 3, 8])
@pytest.mark.parametrize("prompt", [PROMPT, list(range(8)), list(range(30))])
def test_a_full_window_goes_on_with_its_later_half(positions, prompt):
    """Never more than `positions` tokens are seen; where they are full, the last positions // 2 start again at 0."""
    model = decoder(replace(SPEC, max_positions=positions), F64)
    got = list(generate(model, prompt, max_new_tokens=25, temperature=0))
    window = prompt[-positions:]
    for token in got:
        if len(window) > positions:
            window = window[-max(1, positions // 2) :]
        assert token == int(afresh(model, window).argmax())
        window = [*window, token]
    assert len(got) == 25


@pytest.mark.parametrize(
    "changes", [{"num_heads": 9, "num_kv_heads": 3, "head_dim": 16, "hidden_size": 63}, {"tied": True}]
)
def test_greedy_equals_transformers(changes):
    spec = replace(SPEC, **changes)
    hf = make_hf(spec).eval()
    hf.generation_config.eos_token_id = None
    got = list(generate(copied(hf, spec), PROMPT, max_new_tokens=20, temperature=0))
    truth = hf.generate(torch.tensor([PROMPT]), max_new_tokens=20, do_sample=False, use_cache=True, pad_token_id=0)
    assert [*PROMPT, *got] == truth[0].tolist()


# ---------------------------------------------------------------------------------------------- sampling

PROBABILITIES = [0.05, 0.4, 0.0625, 0.25, 0.2375]
DRAWS = 4000


@pytest.mark.parametrize(
    ("arguments", "weights"),
    [
        ((1.0, None, None), PROBABILITIES),
        ((2.0, None, None), [p**0.5 for p in PROBABILITIES]),
        ((0.5, None, None), [p**2 for p in PROBABILITIES]),
        ((1.0, 2, None), [0, 0.4, 0, 0.25, 0]),
        ((1.0, 1, None), [0, 1, 0, 0, 0]),
        ((1.0, 99, None), PROBABILITIES),
        ((1.0, None, 0.3), [0, 1, 0, 0, 0]),
        ((1.0, None, 0.41), [0, 0.4, 0, 0.25, 0]),
        ((1.0, None, 0.9), [0, 0.4, 0.0625, 0.25, 0.2375]),
        ((1.0, None, 1.0), PROBABILITIES),
        # Of the three likeliest, 0.4 / 0.8875 and 0.25 / 0.8875 reach 0.7 together; of all five, they would not.
        ((1.0, 3, 0.7), [0, 0.4, 0, 0.25, 0]),
        # The temperature acts first: squares are 0.16, 0.0625, 0.0564, ... of 0.285.
        ((0.5, None, 0.6), [0, 0.16, 0, 0.0625, 0]),
        ((1e-300, None, None), [0, 1, 0, 0, 0]),
        ((1e300, None, None), [1, 1, 1, 1, 1]),
    ],
)
def test_sampling_against_distributions_made_by_hand(arguments, weights):
    generator = torch.Generator().manual_seed(1)
    logits = torch.tensor(PROBABILITIES).log() + 30.0
    drawn = Counter(int(_sample(logits, *arguments, generator)) for _ in range(DRAWS))
    for token, weight in enumerate(weights):
        wanted = DRAWS * weight / sum(weights)
        spread = math.sqrt(wanted * (1 - weight / sum(weights)))
        assert abs(drawn[token] - wanted) <= 4 * spread, (token, drawn)


def test_top_k_keeps_k_of_equal_logits():
    generator = torch.Generator().manual_seed(1)
    assert len({int(_sample(torch.zeros(50), 1.0, 3, None, generator)) for _ in range(200)}) == 3


def test_top_p_of_a_long_tail():
    """A running sum in float32 stands still at about 1 / 3 of these many small probabilities."""
    tokens = 400_000
    generator = torch.Generator().manual_seed(1)
    logits = torch.linspace(0, -1e-6, tokens)
    drawn = [int(_sample(logits, 1.0, None, 0.5, generator)) for _ in range(20)]
    assert max(drawn) < tokens // 2 + 2
    assert max(drawn) > tokens // 3


def test_a_seed_names_a_text():
    model = decoder(SPEC)
    arguments = {"max_new_tokens": 20, "temperature": 1.5}
    first = list(generate(model, PROMPT, **arguments, seed=3))
    torch.manual_seed(9)
    assert list(generate(model, PROMPT, **arguments, seed=3)) == first
    assert list(generate(model, PROMPT, **arguments, seed=4)) != first
    # The state of one text is its own: two read in turn are what each is alone.
    pairs = list(zip(*(generate(model, PROMPT, **arguments, seed=seed) for seed in (3, 3)), strict=True))
    assert pairs == list(zip(first, first, strict=True))


def test_the_end_token_stops_and_is_not_given():
    model = decoder(SPEC, F64)
    whole = list(generate(model, PROMPT, max_new_tokens=20, temperature=0))
    end = whole[7]
    assert list(generate(model, PROMPT, max_new_tokens=20, temperature=0, end_id=end)) == whole[: whole.index(end)]
    assert list(generate(model, PROMPT, max_new_tokens=20, temperature=0, end_id=whole[0])) == []
    assert list(generate(model, PROMPT, max_new_tokens=3, temperature=0)) == whole[:3]


def test_the_model_stays_as_it_was():
    """No dropout, no gradients, and a model in training goes on in training."""
    plain = decoder(SPEC, F64)
    model = decoder(replace(SPEC, hidden_dropout=0.5, attention_dropout=0.5), F64)
    model.train()
    before, inside = torch.is_grad_enabled(), []
    model.norm.register_forward_hook(lambda *_: inside.append(torch.is_grad_enabled()))
    tokens = generate(model, PROMPT, max_new_tokens=10, temperature=0)
    first = next(tokens)
    assert torch.is_grad_enabled() is before is True
    assert model.training
    assert all(module.training for module in model.modules())
    assert [first, *tokens] == list(generate(plain, PROMPT, max_new_tokens=10, temperature=0))
    assert model.training
    assert inside == [False] * 10


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_ids": []}, "prompt is empty"),
        ({"prompt_ids": [3, 97]}, "token 97 .* vocabulary of 97"),
        ({"prompt_ids": [-1]}, "token -1 "),
        ({"temperature": -0.1}, "temperature -0.1"),
        ({"temperature": math.nan}, "temperature nan"),
        ({"temperature": math.inf}, "temperature inf"),
        ({"top_k": 0}, "top_k 0"),
        ({"top_p": 0.0}, "top_p 0.0"),
        ({"top_p": 1.01}, "top_p 1.01"),
        ({"top_p": math.nan}, "top_p nan"),
        ({"max_new_tokens": 0}, "max_new_tokens 0"),
    ],
)
def test_bad_arguments_are_refused_before_the_first_token(changes, message):
    arguments = {"prompt_ids": PROMPT, "max_new_tokens": 4} | changes
    with pytest.raises(ConfigError, match=message):
        generate(decoder(SPEC), **arguments)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_diverged_model_is_named(temperature):
    model = decoder(SPEC)
    with torch.no_grad():
        model.norm.weight[3] = math.nan
    with pytest.raises(CheckpointError, match="not finite"):
        next(generate(model, PROMPT, max_new_tokens=4, temperature=temperature))
