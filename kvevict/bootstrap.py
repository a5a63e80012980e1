"""Paired bootstrap intervals: how sure a difference between two caches is, given the texts it was measured on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvevict.errors import OptionError

BLOCK = 64
"""Tokens per unit where the units are blocks: losses of neighbouring tokens are not independent."""
FEWEST = 10
"""With fewer units than this an interval is clearly too narrow; of fewer documents, blocks are the units."""


@dataclass(frozen=True)
class Interval:
    """A difference of means, and where it lies.

    difference: of the mean of the first minus the mean of the second, over the units as measured.
    low, high:  the percentile interval; NaN where there are fewer than two units.
    units:      how many there were, and of what: "8 blocks of 64 tokens".
    """

    difference: float
    low: float
    high: float
    units: str

    @property
    def tie(self) -> bool:
        """Whether no difference is within the interval, or nothing can be said."""
        return not (self.low > 0 or self.high < 0)


def paired_bootstrap(
    first: Sequence[Tensor],
    second: Sequence[Tensor],
    *,
    cases: bool = False,
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Interval:
    """The interval of mean(first) - mean(second), for values of the same tokens in the same documents.

    first, second: for each document, a value for each token: (P,), such as nats. The units that are drawn, with
        replacement and the same for both, are documents if there are at least ``FEWEST``, else blocks of
        ``BLOCK`` tokens within them. A unit weighs as many tokens as it has.
    cases: whether the documents are cases, drawn whole however few they are.
    level: the share of resampled differences between ``low`` and ``high``.

    With few units a percentile interval is too narrow. Raises OptionError if the two differ in shape or are
    empty.

    Source: Efron and Tibshirani, "An Introduction to the Bootstrap" (1993, https://doi.org/10.1201/9780429246593),
    chapter 13; blocks after Künsch (1989, https://doi.org/10.1214/aos/1176347265), without overlap.

    >>> a = torch.arange(640.0) % 7
    >>> paired_bootstrap([a + 1], [a])
    Interval(difference=1.0, low=1.0, high=1.0, units='10 blocks of 64 tokens')
    """
    if [len(values) for values in first] != [len(values) for values in second]:
        raise OptionError("the two differ in documents or tokens: compare values of the same tokens")
    if not sum(len(values) for values in first):
        raise OptionError("no values to compare")
    if not 0 < level < 1:
        raise OptionError(f"level={level}: give a share above 0 and below 1, such as 0.95")
    differences = [a.double() - b.double() for a, b in zip(first, second, strict=True) if len(a)]
    units, name = (differences, f"{len(differences)} cases") if cases else units_of(differences)
    sums = torch.stack([unit.sum() for unit in units])  # (U,)
    counts = torch.tensor([len(unit) for unit in units], dtype=torch.double)  # (U,)
    difference = float(sums.sum() / counts.sum())
    if len(units) < 2:
        return Interval(difference, float("nan"), float("nan"), name)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(units), (resamples, len(units)), generator=generator)
    means = sums[drawn].sum(1) / counts[drawn].sum(1)  # (resamples,)
    tail = (1 - level) / 2
    low, high = means.quantile(torch.tensor([tail, 1 - tail], dtype=torch.double)).tolist()
    return Interval(difference, low, high, name)


def units_of(documents: Sequence[Tensor]) -> tuple[list[Tensor], str]:
    """What is drawn: the documents, or blocks of their tokens if they are few; and its name.

    A document's last block takes the tokens that are left over.
    """
    if len(documents) >= FEWEST:
        return list(documents), f"{len(documents)} documents"
    units = []
    for values in documents:
        whole = max(len(values) // BLOCK, 1)
        units += list(values[: whole * BLOCK].split(BLOCK))
        units[-1] = values[(whole - 1) * BLOCK :]
    return units, f"{len(units)} block{'s' * (len(units) > 1)} of {BLOCK} tokens"
