"""The tuner's step and what is around it, for arrays of any library, as the rules are."""

from mechanic import tuner
from mechanic.options import Options
from mechanic.tuner import Array


def advance(
    options: Options,
    state: tuner.State,
    share: Array,
    sums: tuner.Sums,
    takes_part: Array | bool,
    *,
    frozen: bool,
) -> tuple[tuner.State, Array]:
    """The tuner's next state, and the share of the stored displacements that Δ is then."""
    xp = tuner.namespace(share)
    if frozen:
        after, kept = state._replace(D=xp.sqrt(sums.dd)), share
    else:
        after, keep = tuner.update(options, state, sums)
        # keep is 0 only where there is no displacement yet to forget
        kept = xp.where(keep > 0, keep * share, share)
    if takes_part is not True:
        pairs = zip(after, state, strict=True)
        after = tuner.State(*(xp.where(takes_part, new, old) for new, old in pairs))
        kept = xp.where(takes_part, kept, share)
    return after, kept
