"""One portable state: the checkpoint of a mechanized torch optimizer as the state of a mechanized
optax transformation, and back.

    state = convert.from_torch(optimizer.state_dict(), tx.init(params), arrange=to_jax)
    optimizer.load_state_dict(convert.to_torch(state, optimizer, arrange=to_torch))

The numbers of the tuner, the displacements and the state of the base go over; the parameters
themselves are the model's, and have to be taken over as usual. The function that does so for them,
from a list of arrays to a tree or back, is `arrange`: transposed kernels are transposed in the
state as well.

Numbers go over bit for bit where the dtype is the same. A tuner in torch has float64, and so has
one in JAX where `jax_enable_x64` is set. Else it has float32: what comes from torch is then
rounded, once, and what goes to torch is not.
"""

from mechanic.convert.into_optax import from_torch
from mechanic.convert.into_torch import to_torch

__all__ = ["from_torch", "to_torch"]
