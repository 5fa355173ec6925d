"""Adam's moments as bfloat16, rounded up or down at random, in torch's operators, on any device.

The same bits as cuda_ext/csrc/common/compact.h, which says why and on what the dither depends, makes of the same
float32 numbers.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

COMPACT = torch.bfloat16
"""The type of compact moments; parameters are float32 then."""

WANDER = 1.25
"""Points whose moments are compact may move so many times as far as a `LazyAdam`'s table says."""

_SCALARS = [0, 4, 5]
"""The rate and both bias corrections in a line of scalars."""
_LINE = [0, 2, 3]
"""The sum of rates and both decays in a line of the table."""
_VIEW = [0, 3, 7]
"""In a view's matrix: a number of its rotation, and two of its translation."""


def is_compact(moments: Sequence[Tensor]) -> bool:
    """Return whether a list of moments is kept as bfloat16."""
    return len(moments) > 0 and moments[0].dtype == COMPACT


def step_salts(scalars: Tensor, viewmats: Tensor) -> Tensor:
    """Return [6] int32 salts, one for each tensor, that make a step's dither differ from other steps'.

    Args:
        scalars: [6, 8] the step's. viewmats: [V, 4, 4] its views'.
    """
    salt = _salt(scalars[0, _SCALARS])
    if len(viewmats) > 0:
        salt = _salt(viewmats[0].reshape(-1)[_VIEW], salt)
    return _of_tensors(salt, len(scalars))


def flush_salts(table: Tensor) -> Tensor:
    """Return `step_salts` of a flush with this table [MOST_STEPS + 1, 6, 8]."""
    return _of_tensors(_salt(table[0, 0, _LINE]), table.shape[1])


def compacted(salt: Tensor, moment1: Tensor, moment2: Tensor) -> tuple[Tensor, Tensor]:
    """Round both moments [...] of some elements from float32 to bfloat16, stochastically.

    A number becomes one of its two neighbours, each with such a probability that the expected value is exact. Values
    that bfloat16 can hold, zeros and infinities too, do not change. NaN stays NaN.

    Args:
        salt: [] int32, see `step_salts`.
    """
    first, second = moment1.contiguous().view(torch.int32), moment2.contiguous().view(torch.int32)
    random = _scrambled((first * _signed(0x9E3779B1)) ^ second ^ salt)
    return _dithered(first, random & 0xFFFF), _dithered(second, (random >> 16) & 0xFFFF)


@contextmanager
def as_floats(
    exp_avgs: Sequence[Tensor], exp_avg_sqs: Sequence[Tensor], salts: Callable[[], Tensor]
) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Yield moments in the parameters' type, to be changed in place. Compact moments are copied and rounded at the end.

    Args:
        salts: makes those of the dither, before anything is changed.
    """
    if not is_compact(exp_avgs):
        yield list(exp_avgs), list(exp_avg_sqs)
        return
    salt = salts()
    wide = [m.float() for m in exp_avgs], [v.float() for v in exp_avg_sqs]
    yield wide
    for i, (m, v) in enumerate(zip(*wide, strict=True)):
        first, second = compacted(salt[i], m, v)
        exp_avgs[i].copy_(first)
        exp_avg_sqs[i].copy_(second)


def _salt(numbers: Tensor, before: Tensor | int = 0) -> Tensor:
    a, b, c = numbers.contiguous().view(torch.int32).unbind()
    return _scrambled(_scrambled(_scrambled(a + before) + b) + c)


def _of_tensors(salt: Tensor, tensors: int) -> Tensor:
    return _scrambled(salt + torch.arange(tensors, dtype=torch.int32, device=salt.device))


def _scrambled(words: Tensor) -> Tensor:
    """Return the finaliser of MurmurHash3 on int32, whose products wrap around and whose shifts are to shift in
    zeros."""
    words = words ^ ((words >> 16) & 0xFFFF)
    words = words * _signed(0x85EBCA6B)
    words = words ^ ((words >> 13) & 0x7FFFF)
    words = words * _signed(0xC2B2AE35)
    return words ^ ((words >> 16) & 0xFFFF)


def _dithered(words: Tensor, random16: Tensor) -> Tensor:
    nan = (words & 0x7FFFFFFF) > 0x7F800000
    words = torch.where(nan, words | 0x00400000, words + random16)
    return (words >> 16).to(torch.int16).view(COMPACT)


def _signed(word: int) -> int:
    """Return the int32 of the same bits."""
    return word - (1 << 32) if word >= 1 << 31 else word
