"""The fast path on a GPU: a step in three launches, whatever the number of tensors.

`passes` has the Triton kernels: the sums, the tuner, the update. `rule` turns the tuner's rule, as
`mechanic.tuner` has it, into Triton code, so that it stands once. `known` tells which bases are
computed in the update itself, and `plan` where all the tensors lie.

`mechanic.torch.fast` runs them; nothing here is imported where there is no Triton.
"""
