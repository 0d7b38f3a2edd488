"""Dropout whose masks are a pure function of what is dropped, not of when or where it is computed.

An element's fate is a hash of (key, token, feature), where a token is named by its sample, document and position. So
the mask is the same in any micro-batch, on any rank, in any order, and when activations are computed again. The hash
is the splitmix64 generator (Steele, Lea and Flood 2014) on int64 tensors, whose products wrap modulo 2^64.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_TEMPORARY_ELEMENTS = 1 << 21  # hashes formed at once: 16 MB of int64


def _signed(n: int) -> int:
    """The int64 with the same 64 bits as the unsigned `n`."""
    return n - (1 << 64) if n >= 1 << 63 else n


_GAMMA = _signed(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = _signed(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = _signed(0x94D049BB133111EB)


def _xor_shifted_(z: Tensor, bits: int) -> Tensor:
    """`z ^= z >>> bits`. int64 shifts copy the sign bit, so the bits shifted in are cleared."""
    return z.bitwise_xor_((z >> bits).bitwise_and_((1 << (64 - bits)) - 1))


def _mix_(z: Tensor) -> Tensor:
    """One output of splitmix64 for each state, in place."""
    z.add_(_GAMMA)
    _xor_shifted_(z, 30).mul_(_MULTIPLIER_1)
    _xor_shifted_(z, 27).mul_(_MULTIPLIER_2)
    return _xor_shifted_(z, 31)


def _least_kept(p: float) -> int:
    """The hash, read as a signed number, at and above which an element stays."""
    if not 0 <= p < 1:
        raise ValueError(f"a dropout probability lies in [0, 1), not {p}")
    return min(round(p * 2**64), 2**64 - 1) - 2**63


def random_key(*parts: int | str) -> int:
    """A 63-bit key from names and numbers, such as ("mlp", layer, step); equal in every process and version.

    Raises:
        TypeError: a part that is neither int nor str.
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        if not isinstance(part, (int, str)):
            raise TypeError(f"a key is made of int and str, not {type(part).__name__}")
        text = str(part).encode()
        # Kind and length come first: ("1",) and (1,), ("ab", "c") and ("a", "bc") are different keys.
        digest.update(f"{'s' if isinstance(part, str) else 'i'}{len(text)}:".encode() + text)
    return int.from_bytes(digest.digest(), "big") >> 1


def random_words(key: int, first: int, count: int, device: torch.device) -> Tensor:
    """int64 [count]: the random words with the numbers `first`, `first + 1`, ... of a key."""
    return _mix_(torch.arange(first, first + count, device=device).mul_(_GAMMA).add_(key))


def token_keys(sample_ids_BS: Tensor, document_ids_BS: Tensor, position_ids_BS: Tensor) -> Tensor:
    """int64 `[B, S]`: one hash a token, from its sample, its document in the sample, its position in the document."""
    keys_BS = torch.zeros_like(position_ids_BS, dtype=torch.int64)
    for ids_BS in (sample_ids_BS, document_ids_BS, position_ids_BS):
        keys_BS = _mix_(keys_BS + ids_BS)
    return keys_BS


def dropout_mask(p: float, key: int, token_keys_BS: Tensor, features: int, *, first_feature: int = 0) -> Tensor:
    """bool `[B, S, features]`, true where the element is kept.

    Args:
        p: probability to drop, in [0, 1).
        key: from `random_key`.
        token_keys_BS: from `token_keys`.
        features: size of the feature dimension.
        first_feature: number of the first feature, where a rank holds only some of them.
    """
    least = _least_kept(p)
    states_N = _mix_(token_keys_BS.reshape(-1) ^ key)
    steps_D = torch.arange(first_feature, first_feature + features, device=states_N.device) * _GAMMA
    kept_ND = torch.empty(states_N.shape[0], features, dtype=torch.bool, device=states_N.device)
    tokens = max(1, _TEMPORARY_ELEMENTS // max(1, features))
    for start in range(0, states_N.shape[0], tokens):
        chunk = slice(start, start + tokens)
        kept_ND[chunk] = _mix_(states_N[chunk, None] + steps_D) >= least
    return kept_ND.view(*token_keys_BS.shape, features)


def dropout(x_BSD: Tensor, p: float, key: int, token_keys_BS: Tensor, *, first_feature: int = 0) -> Tensor:
    """Zeroes elements with probability p and multiplies the others by 1 / (1 - p); see `dropout_mask`.

    Returns:
        `[B, S, D]` in the dtype of x; x itself where p is 0. Backward keeps the mask, one byte an element.

    Raises:
        ValueError: p outside [0, 1).
    """
    if p == 0:
        return x_BSD
    kept_BSD = dropout_mask(p, key, token_keys_BS, x_BSD.shape[-1], first_feature=first_feature)
    return torch.where(kept_BSD, x_BSD, 0.0) * (1 / (1 - p))


def attention_dropout_mask(
    p: float,
    key: int,
    q_keys_BS: Tensor,
    k_keys_BT: Tensor,
    heads: int,
    *,
    first_head: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """`[B, heads, S, T]` of 0 and 1 / (1 - p): what attention probabilities are multiplied by.

    Args:
        p: probability to drop, in [0, 1).
        key: from `random_key`.
        q_keys_BS: `token_keys` of the queries.
        k_keys_BT: `token_keys` of the keys.
        heads: how many query heads.
        first_head: number of the first head, where a rank holds only some of them.
        dtype: of the result.
    """
    least = _least_kept(p)
    head_states_H = _mix_(torch.arange(first_head, first_head + heads, device=q_keys_BS.device) * _GAMMA ^ key)
    states_BHS = _mix_(q_keys_BS[:, None, :] ^ head_states_H[None, :, None])
    batch, length = q_keys_BS.shape
    mask_BHST = torch.empty(batch, heads, length, k_keys_BT.shape[1], dtype=dtype, device=q_keys_BS.device)
    for row in range(batch):
        kept_HST = _mix_(states_BHS[row, :, :, None] + k_keys_BT[row]) >= least
        mask_BHST[row] = kept_HST.to(dtype).mul_(1 / (1 - p))
    return mask_BHST
