"""The handle on a mechanized optimizer's tuner."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from mechanic.suggestion import suggest
from mechanic.torch.attach import INNER, is_mechanized
from mechanic.torch.call import Call, unhooked
from mechanic.torch.detach import detach
from mechanic.torch.diagnosis import hints, wrong
from mechanic.torch.mechanism import MECHANISM
from mechanic.torch.observation import observe
from mechanic.torch.rates import EFFECTIVE_LR, effective_lrs
from mechanic.torch.scopes import Part, parts_of
from mechanic.torch.sharding import agree

T = TypeVar("T")


def tuner(optimizer: Optimizer) -> "Tuner":
    """The handle on the tuner of a mechanized optimizer.

    Args:
        optimizer: a mechanized optimizer, or one that wraps it, such as a trainer's.

    Returns:
        The handle. It holds nothing of its own, so it may be made anew wherever it is needed.

    Raises:
        ValueError: if the optimizer is not mechanized.

    Examples:
        The loss is `weights.sum()`, along which the scale grows until it is at its cap.

        >>> import torch
        >>> from mechanic.torch import mechanize, tuner
        >>> weights = torch.nn.Parameter(torch.ones(3))
        >>> optimizer = mechanize(torch.optim.SGD([weights], lr=0.25), max_scale=0.5)
        >>> for _ in range(20):
        ...     weights.grad = torch.ones(3)
        ...     optimizer.step()
        >>> tuner(optimizer)
        Tuner(scale=0.5, steps=20)
    """
    names = (*INNER, "optim")
    while not is_mechanized(optimizer):  # a trainer's wrapper, SAM, a Lookahead, or ZeRO's
        inner = next((getattr(optimizer, name) for name in names if hasattr(optimizer, name)), None)
        if inner is None:
            break
        optimizer = inner
    if not is_mechanized(optimizer):
        raise ValueError(
            f"this {type(optimizer).__name__} is not mechanized, so it has no tuner. "
            "Write optimizer = mechanize(optimizer) first."
        )
    return Tuner(optimizer)


class Tuner:
    """What a mechanized optimizer has learned, and how to stop it learning.

    `tuner(optimizer)` makes one.

    Examples:
        >>> import torch
        >>> from mechanic.torch import mechanize, tuner
        >>> slow, fast = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
        >>> groups = [{"params": [slow], "lr": 0.25}, {"params": [fast]}]
        >>> optimizer = mechanize(torch.optim.SGD(groups, lr=1.0), max_scale=0.5)
        >>> for _ in range(20):
        ...     slow.grad = fast.grad = torch.ones(3)
        ...     optimizer.step()
        >>> handle = tuner(optimizer)
        >>> float(handle.scale), [float(lr) for lr in handle.effective_lr], list(handle.scopes)
        (0.5, [0.125, 0.5], ['all'])
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer: Any = optimizer

    def __repr__(self) -> str:
        steps = [int(part.mechanism.counts.read().steps) for part in self._parts]
        scales = {name: f"{float(own.scale):.3g}" for name, own in self.scopes.items()}
        shown = ", ".join(scales.values() if len(scales) == 1 else map(": ".join, scales.items()))
        return f"Tuner(scale={shown}, steps={max(steps)})"

    @property
    def _parts(self) -> list[Part]:
        if getattr(self._optimizer, MECHANISM, None) is None:
            raise ValueError(
                "this optimizer was detached from its tuner; mechanize it anew to tune it."
            )
        return parts_of(self._optimizer)

    @property
    def scopes(self) -> dict[str, "Tuner"]:
        """A handle on the tuner of each scope, by its name; of one scale for all it is `"all"`."""
        return {part.name: Tuner(part.optimizer) for part in self._parts}

    @property
    def scale(self) -> Tensor:
        """The learned scale S, a 0-d tensor on the parameters' device; where there are several
        scopes, a tensor with one number for each."""
        scales = [part.mechanism.scale for part in self._parts]
        return scales[0].clone() if len(scales) == 1 else torch.stack(_at_one_place(scales))

    @property
    def effective_lr(self) -> list[Tensor]:
        """The learning rate that was in force in each group in the last step: the scale times the
        group's lr. A schedule may have moved on since."""
        present = self._for_each_group(
            lambda part: effective_lrs(part.mechanism.scale, part.optimizer.param_groups)
        )
        groups = self._optimizer.param_groups
        pairs = zip(groups, present, strict=True)  # a group that was added has no rate yet
        return [group.get(EFFECTIVE_LR, rate).clone() for group, rate in pairs]

    def _for_each_group(self, of_part: Callable[[Part], Iterable[T]]) -> list[T]:
        """What there is for the groups of each part, in the order of all groups."""
        found = {
            id(group): own
            for part in self._parts
            for group, own in zip(part.optimizer.param_groups, of_part(part), strict=True)
        }
        return [found[id(group)] for group in self._optimizer.param_groups]

    @property
    def frozen(self) -> bool:
        """Whether the scale is held."""
        return all(part.mechanism.frozen for part in self._parts)

    def metrics(self) -> dict[str, Tensor]:
        """Everything worth logging, as tensors on the device: nothing waits until one is read.

        `scales` has one number for each β; `signal` is ⟨Δ, g⟩, negative while a larger scale would
        have been better. Where there are several scopes, their names follow: `scale/head`.

        Returns:
            Tensors by their names.

        Examples:
            >>> import torch
            >>> from mechanic.torch import mechanize, tuner
            >>> weights = torch.nn.Parameter(torch.ones(3))
            >>> optimizer = mechanize(torch.optim.SGD([weights], lr=0.25), max_scale=0.5)
            >>> for step in range(25):
            ...     weights.grad = torch.full((3,), float("nan") if step == 3 else 1.0)
            ...     optimizer.step()
            >>> numbers = tuner(optimizer).metrics()
            >>> {name: numbers[name].item() for name in ("scale", "effective_lr/0")}
            {'scale': 0.5, 'effective_lr/0': 0.125}
            >>> {name: numbers[name].item() for name in ("steps", "skipped")}
            {'steps': 24, 'skipped': 1}
        """
        parts = self._parts
        rates = {f"effective_lr/{i}": rate for i, rate in enumerate(self.effective_lr)}
        found: dict[str, Tensor] = {}
        for name, _, mechanism in parts:
            numbers, counted = mechanism.scalars.read(), mechanism.counts.read()
            own = {
                "scale": numbers.scale,
                "signal": numbers.signal,
                "scales": numbers.state.s,
                "steps": counted.steps,
                "skipped": counted.skipped,
            }
            end = "" if len(parts) == 1 else f"/{name}"
            found |= {f"{key}{end}": value.clone() for key, value in own.items()}
        return found | rates

    def freeze(self) -> None:
        """Hold the scale where it is; the base goes on with the learning rate it has.

        Examples:
            >>> import torch
            >>> from mechanic.torch import mechanize, tuner
            >>> weights = torch.nn.Parameter(torch.ones(3))
            >>> optimizer = mechanize(torch.optim.SGD([weights], lr=1.0))
            >>> def train(steps):
            ...     for _ in range(steps):
            ...         weights.grad = torch.ones(3)
            ...         optimizer.step()
            ...     return float(tuner(optimizer).scale)
            >>> learned = train(20)
            >>> tuner(optimizer).freeze()
            >>> train(20) / learned  # without freeze() it would have doubled in each step
            1.0
        """
        for part in self._parts:
            part.mechanism.frozen = True

    def unfreeze(self) -> None:
        """Go on tuning, from what was known when the scale was frozen.

        Examples:
            Along this loss, `weights.sum()`, the scale doubles in each step, and does so again
            after `unfreeze`.

            >>> import torch
            >>> from mechanic.torch import mechanize, tuner
            >>> weights = torch.nn.Parameter(torch.ones(3))
            >>> optimizer = mechanize(torch.optim.SGD([weights], lr=1.0))
            >>> def train(steps):
            ...     for _ in range(steps):
            ...         weights.grad = torch.ones(3)
            ...         optimizer.step()
            ...     return float(tuner(optimizer).scale)
            >>> learned = train(20)
            >>> tuner(optimizer).freeze()
            >>> held = train(20)
            >>> tuner(optimizer).unfreeze()
            >>> held / learned, round(train(3) / held, 3)
            (1.0, 8.0)
        """
        for part in self._parts:
            part.mechanism.frozen, part.mechanism.scalars.observed = False, None

    def observe(self) -> None:
        """Tune on held-out data: learn in the next step from the gradients that the parameters have
        now, in place of the step's own, and from no others.

            for step, batch in enumerate(train_batches):
                if step % 4 == 0:
                    optimizer.zero_grad()
                    loss_of(model, next(held_out_batches)).backward()
                    tuner(optimizer).observe()
                optimizer.zero_grad()
                loss_of(model, batch).backward()
                optimizer.step()

        In steps without an observation the scale is held, as by `freeze()`; `unfreeze()` goes back
        to the gradients of the steps. Nothing is stored but two numbers. Where parameters are
        sharded, all processes have to observe in the same step.

        Raises:
            ValueError: if no parameter has a gradient, or none of a scope.

        Examples:
            Of 40 steps, the 10 with an observation change the scale.

            >>> import torch
            >>> from mechanic.torch import mechanize, tuner
            >>> weights = torch.nn.Parameter(torch.ones(3))
            >>> optimizer = mechanize(torch.optim.SGD([weights], lr=1.0))
            >>> scales = set()
            >>> for step in range(40):
            ...     weights.grad = torch.ones(3)  # of a held-out batch
            ...     if step % 4 == 0:
            ...         tuner(optimizer).observe()
            ...     weights.grad = torch.tensor([1.0, 1.0, 0.0])  # of a batch to train on
            ...     optimizer.step()
            ...     scales.add(float(tuner(optimizer).scale))
            >>> len(scales)
            10
        """
        base_step = unhooked(type(self._optimizer)._base.step)
        for _, part, mechanism in self._parts:
            observe(Call(part, mechanism, base_step, (), {}))

    def agrees(self, process_group: Any = None) -> bool:
        """Whether all processes of a group (those that share the parameters, or all there are)
        have learned the same, bit for bit.

        Every one of them has to ask. A step never does: under DistributedDataParallel the
        gradients are the same everywhere, and so is all that follows from them.

        Args:
            process_group: the processes to ask. None stands for those that share the parameters,
                or for all.

        Raises:
            ValueError: if torch.distributed was not initialized.

        Examples:
            This one is a process group of one; `torchrun` starts several.

            >>> import torch
            >>> from mechanic.torch import mechanize, tuner
            >>> store = torch.distributed.HashStore()
            >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
            >>> weights = torch.nn.Parameter(torch.ones(3))
            >>> optimizer = mechanize(torch.optim.SGD([weights], lr=1.0))
            >>> tuner(optimizer).agrees()
            True
            >>> torch.distributed.destroy_process_group()
        """
        agreed = []
        for _, part, mechanism in self._parts:
            ranks = mechanism.find_ranks(part)
            group = ranks.group if process_group is None and ranks is not None else process_group
            agreed.append(agree(mechanism.scalars.shared.reshape(-1), group))
        return all(agreed)

    def suggest_lr(self) -> list[float]:
        """The learning rate to type for the plain optimizer, one for each group: with the same
        schedule, it would have added up to the same over the run.

        Where a schedule runs, it is the rate to start the schedule with; with OneCycleLR, `max_lr`.
        Before the first step it is 0.

        Returns:
            A number for each group.

        Examples:
            Here, lr=100 would have diverged. A plain optimizer with the suggestion converges.

            >>> import torch
            >>> from mechanic.torch import mechanize, tuner
            >>> weights = torch.nn.Parameter(torch.ones(3))
            >>> def train(optimizer):
            ...     for _ in range(60):
            ...         weights.grad = weights.detach() - 3
            ...         optimizer.step()
            ...     return round(float(weights.detach().mean()), 2)
            >>> tuned = mechanize(torch.optim.SGD([weights], lr=100.0))
            >>> train(tuned)
            3.0
            >>> weights = torch.nn.Parameter(torch.ones(3))
            >>> train(torch.optim.SGD([weights], lr=tuner(tuned).suggest_lr()[0]))
            3.0
        """
        return self._for_each_group(
            lambda part: suggest(
                float(part.mechanism.scalars.read().mean_scale),
                part.optimizer.param_groups,
                seen=part.mechanism.history.lrs,
            )
        )

    def diagnose(self) -> str:
        """What looks wrong so far, each cause in a line with its fix, or a line that says that
        nothing does. It waits for the device.

        A tuner knows its present numbers and little of its past. It cannot see that the scale has
        fallen; `mechanic doctor` sees that, in the log of a run.

        Returns:
            The lines. Where there are several scopes, each begins with the name of its scope.

        Examples:
            >>> import torch
            >>> from mechanic.torch import mechanize, tuner
            >>> weights = torch.nn.Parameter(torch.ones(3))
            >>> optimizer = mechanize(torch.optim.SGD([weights], lr=0.25), max_scale=0.5)
            >>> print(tuner(optimizer).diagnose())
            nothing to say yet: no step was taken, or none that had a gradient. If step() ...
            >>> for _ in range(60):
            ...     weights.grad = torch.ones(3)
            ...     optimizer.step()
            >>> print(tuner(optimizer).diagnose())
            the scale hit its cap of 0.5, and is there now. The cap held the lr back: raise ...
        """
        parts, lines = self._parts, []
        for name, part, mechanism in parts:
            healthy = f"healthy: nothing looks wrong, and the scale is {mechanism.scale:.3g}"
            begin = "" if len(parts) == 1 else f"{name}: "
            said = list(wrong(part, mechanism)) or [healthy]
            said += hints(mechanism)
            lines += [begin + line for line in said]
        return "\n".join(lines)

    def detach(self) -> Optimizer:
        """Give the plain optimizer back: the same object, of its own class again, with its own
        state, the learned lr in its groups, and its schedules at the learned scale.

        Returns:
            The optimizer, which is no longer mechanized.

        Raises:
            ValueError: if a scheduler has one rate for groups whose learned scales differ.

        Examples:
            >>> import torch
            >>> from mechanic.torch import mechanize, tuner
            >>> weights = torch.nn.Parameter(torch.ones(3))
            >>> optimizer = mechanize(torch.optim.SGD([weights], lr=0.25), max_scale=0.5)
            >>> for _ in range(20):
            ...     weights.grad = torch.ones(3)
            ...     optimizer.step()
            >>> plain = tuner(optimizer).detach()
            >>> plain is optimizer, type(plain) is torch.optim.SGD, plain.param_groups[0]["lr"]
            (True, True, 0.125)
        """
        # Where nothing was learned yet, it is the lr that was typed.
        scales = self._for_each_group(
            lambda part: [float(part.mechanism.scale) or 1.0] * len(part.optimizer.param_groups)
        )
        return detach(self._optimizer, self._parts, scales)


def _at_one_place(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.to(tensors[0].device) for tensor in tensors]
