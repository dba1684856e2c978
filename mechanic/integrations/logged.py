"""The numbers to log, under the same names everywhere."""

import torch
from torch import Tensor
from torch.optim import Optimizer

from mechanic.torch.handle import tuner

PREFIX = "mechanic"


def metrics(optimizer: Optimizer, prefix: str = PREFIX) -> dict[str, float]:
    """What a logger takes: the learned scale, and the learning rate of each group in the last step.

    A group goes by its `name`, where it has one, and else by its place. Where there are several
    scopes, there is a scale for each, as in `mechanic/scale/text`. The call waits for the device
    once.

    Args:
        optimizer: a mechanized optimizer, or the wrapper of a trainer around it.
        prefix: the first part of each name; of use where there are several optimizers.

    Returns:
        Numbers by their names.

    Raises:
        ValueError: if the optimizer is not mechanized, or if two of its groups have the same name.

    Examples:
        >>> import torch
        >>> from mechanic.integrations import metrics
        >>> from mechanic.torch import mechanize
        >>> weights = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
        >>> groups = [{"params": weights[:1], "name": "head"}, {"params": weights[1:], "lr": 0.25}]
        >>> optimizer = mechanize(torch.optim.SGD(groups, lr=0.5), max_scale=0.5)
        >>> for _ in range(20):
        ...     weights[0].grad = weights[1].grad = torch.ones(3)
        ...     optimizer.step()
        >>> metrics(optimizer)
        {'mechanic/scale': 0.5, 'mechanic/lr/head': 0.25, 'mechanic/lr/1': 0.125}
    """
    found = tensors(optimizer, prefix)
    home = next(iter(found.values())).device
    values = torch.stack([value.to(home, torch.float64) for value in found.values()]).tolist()
    return dict(zip(found, values, strict=True))


def tensors(optimizer: Optimizer, prefix: str = PREFIX) -> dict[str, Tensor]:
    """The same numbers as tensors on the device: nothing waits until one is read."""
    handle = tuner(optimizer)
    groups = optimizer.param_groups
    names = [str(group.get("name", place)) for place, group in enumerate(groups)]
    if len(set(names)) < len(names):
        raise ValueError(
            f"the groups of this {type(optimizer).__name__} have the names {', '.join(names)}, so "
            "that one rate would be logged over another. Give each group a name of its own."
        )
    scopes = handle.scopes
    found = {
        f"{prefix}/scale" if len(scopes) == 1 else f"{prefix}/scale/{scope}": own.scale
        for scope, own in scopes.items()
    }
    for name, rate in zip(names, handle.effective_lr, strict=True):
        found[f"{prefix}/lr/{name}"] = rate
    return found
