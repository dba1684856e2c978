"""The columns of the tables that the kernels read and write."""

import triton.language as tl


class _Column(tl.constexpr):
    """A number that the kernels know. Triton compares those at each launch, slowly by default."""

    def __ne__(self, other: object) -> bool:
        return self.value != getattr(other, "value", None)


# The columns of the table of tensors.
X, DELTA, FIRST, SECOND, STEP, NUMEL, GROUP, PLACE, COUNTS = map(_Column, range(9))
COLUMNS = _Column(9)
"""The addresses of x, Δ, the base's two slots and its count of steps; the number of elements, the
group, the place in the copy of x, and 0 where it counts on another process that holds the same"""

# The columns of the table of groups: their settings, as they are typed.
LR, UNIT, SIGN, PRESENT, A, B, EPS, DECAY, LOG_A, LOG_B, BASE_LR = map(_Column, range(11))
SETTINGS = _Column(11)

# The columns of what a step does to a group, which `tune` writes for the passes after it: how the
# parameters and the stored displacements are moved, and the settings that the base is run at.
X_PER_STORED, X_PER_PROPOSAL, STORED_PER_PROPOSAL, KEPT, FACTOR = map(_Column, range(5))
USED_A, REST_A, USED_B, REST_B, USED_EPS, USED_DECAY, USED_BASE_LR = map(_Column, range(5, 12))
COEFFICIENTS = _Column(12)

# The counts, in the order of `mechanic.torch.counts.Counted`.
STEPS, UPDATES, SKIPPED, SKIPPED_IN_A_ROW = map(_Column, range(4))

# The columns of `partials`, one for each sum; ⟨Δ, g⟩ is the first (`step._run_any`).
DG, DD, ALL_GG, GG, DX, XX, UU = map(_Column, range(7))
SUMS = 7
