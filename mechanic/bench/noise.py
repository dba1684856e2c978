"""How much of the difference between two methods is only noise between seeds."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal

# Two-sided 95 % quantiles of Student's t, by degrees of freedom from 1.
_T95 = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)


def t_quantile(freedom: int) -> float:
    """The two-sided 95 % quantile of Student's t."""
    if freedom <= len(_T95):
        return _T95[freedom - 1]
    z = 1.959964  # of the normal distribution; two terms of Fisher's expansion give 3 digits
    second = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    return z + (z**3 + z) / (4 * freedom) + second


@dataclass(frozen=True)
class Difference:
    """The difference of two methods, paired over the seeds that both were run with."""

    mean: float
    noise: float
    """Half the 95 % interval of the mean; NaN where there is only one seed."""
    seeds: int

    @property
    def within_noise(self) -> bool | None:
        """Whether 0 lies in the interval; None if the noise is unknown."""
        return None if math.isnan(self.noise) else abs(self.mean) <= self.noise

    @property
    def verdict(self) -> Literal["better", "worse", "within_noise", "undecided"]:
        """How the first method compares with the second, where low is good."""
        if self.within_noise is None:
            return "undecided"
        if self.within_noise:
            return "within_noise"
        return "better" if self.mean < 0 else "worse"


def paired(
    ours: Mapping[int, float], theirs: Mapping[int, float], scale: float = 1.0
) -> Difference | None:
    """`scale` times ours minus theirs, over the seeds in common; None if there are none."""
    gaps = [scale * (ours[seed] - theirs[seed]) for seed in sorted(ours.keys() & theirs.keys())]
    if not gaps:
        return None
    if len(gaps) == 1:
        return Difference(gaps[0], math.nan, 1)
    noise = t_quantile(len(gaps) - 1) * stdev(gaps) / math.sqrt(len(gaps))
    return Difference(fmean(gaps), noise, len(gaps))
