"""The fast path on a GPU: a step in a few launches, whatever the number of tensors.

`dispatch` tells whether the kernels can make a step, and `step` makes it with the launches of
`launch`. `passes` and `scalar_passes` have the Triton kernels: the sums, the tuner, the update.
`rule` turns the tuner's rule, as `mechanic.tuner` has it, into Triton code, so that it stands once.
`known` has the bases whose update the kernels compute, and `plan` what they know of an optimizer.

Where there is no Triton, only `dispatch`, `listen` and `step` are imported.
"""
