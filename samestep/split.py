"""Micro-batches by a budget of positions: which samples of a step go together. Pure arithmetic; imports no torch."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Sequence


def positions(lengths: Sequence[int], packed: bool) -> int:
    """Positions of a micro-batch of samples with these lengths, padding included."""
    return sum(lengths) if packed else len(lengths) * max(lengths, default=0)


def split_by_budget(lengths: Sequence[int], ranks: int, budget: int, *, packed: bool) -> list[list[list[int]]]:
    """The micro-batches of every rank, as places in `lengths`; every place is in one of them.

    Padded samples are sorted by length first, so that those of a micro-batch are about as long. No micro-batch has more
    than `budget` positions, but for a sample that is longer by itself. There are as few as that allows, rounded up to
    as many for each rank where the samples suffice; then all are made as equal as they can be. On each rank the larger
    ones come first, so that what does not fit into memory shows at once.

    Args:
        lengths: of the samples of one step, in any order.
        budget: positions of a micro-batch at most, padding included.
        packed: samples are laid end to end, without padding.
    """
    order = sorted(range(len(lengths)), key=lambda place: -lengths[place])
    falling = [lengths[place] for place in order]
    groups: Sequence[Sequence[int]] = (
        _packed_groups(falling, ranks, budget) if packed else _padded_groups(falling, ranks, budget)
    )
    sized = [(positions([falling[i] for i in group], packed), group) for group in groups]
    return [[sorted(order[i] for i in group) for group in dealt] for dealt in _deal(sized, ranks)]


def _rounded_up(count: int, ranks: int, samples: int) -> int:
    return min(math.ceil(count / ranks) * ranks, samples)


def _cut(falling: Sequence[int], budget: int) -> list[range]:
    """As few consecutive pieces as possible of at most `budget` positions each when padded, or of one sample."""
    pieces, start = [], 0
    while start < len(falling):
        stop = min(start + max(1, budget // max(1, falling[start])), len(falling))
        pieces.append(range(start, stop))
        start = stop
    return pieces


def _padded_groups(falling: Sequence[int], ranks: int, budget: int) -> list[range]:
    """The smallest budget that needs no more pieces makes them most equal."""
    count = _rounded_up(len(_cut(falling, budget)), ranks, len(falling))
    least = bisect_left(range(budget), True, key=lambda size: len(_cut(falling, size)) <= count)
    return _cut(falling, least)


def _packed_groups(falling: Sequence[int], ranks: int, budget: int) -> list[list[int]]:
    """Longest first, each to the group with fewest positions (Graham 1969), which also mixes long with short."""
    longer = sum(length > budget for length in falling)
    count = max(1, longer + math.ceil(sum(falling[longer:]) / budget))
    while True:
        count = _rounded_up(count, ranks, len(falling))
        groups: list[list[int]] = [[] for _ in range(count)]
        heap = [(0, number) for number in range(count)]
        for place, length in enumerate(falling):
            size, number = heap[0]
            groups[number].append(place)
            heapq.heapreplace(heap, (size + length, number))
        if all(size <= budget or len(groups[number]) == 1 for size, number in heap):
            return groups
        count += 1


def _deal(sized: Sequence[tuple[int, Sequence[int]]], ranks: int) -> list[list[Sequence[int]]]:
    """In rounds of one for each rank, the larger ones to the ranks that have least so far."""
    sized = sorted(sized, key=lambda one: -one[0])
    dealt: list[list[Sequence[int]]] = [[] for _ in range(ranks)]
    totals = [0] * ranks
    for start in range(0, len(sized), ranks):
        free = sorted(range(ranks), key=totals.__getitem__)
        for rank, (size, group) in zip(free, sized[start : start + ranks], strict=False):
            dealt[rank].append(group)
            totals[rank] += size
    return dealt
