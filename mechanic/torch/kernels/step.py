"""The step of `mechanic.torch.plain` with the kernels, on a GPU: the same result in a few launches.

Triton is imported only where a plan was found.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from mechanic import tuner
from mechanic.torch import skipping
from mechanic.torch.base import is_familiar
from mechanic.torch.call import Call
from mechanic.torch.capture import is_capturing
from mechanic.torch.flag import Flag
from mechanic.torch.history import StepRates
from mechanic.torch.kernels.dispatch import Found, find_plan
from mechanic.torch.measure import Parts
from mechanic.torch.rates import EFFECTIVE_LR, is_proportional
from mechanic.torch.sharding import Message, begin_sum, check_size

if TYPE_CHECKING:
    from mechanic.torch.kernels.copies import PackedCopies
    from mechanic.torch.kernels.launch import Inputs
    from mechanic.torch.kernels.plan import Plan

_LIVE, _MEASURES, _NEW_D = map(Parts._fields.index, ("live", "measures_update", "new_d"))


class Begun(NamedTuple):
    """A step that has begun: its sums are being taken."""

    plan: "Plan"
    addresses: list[int]
    inputs: "Inputs"
    rates: StepRates


def begin(call: Call) -> Begun | None:
    """Launch the sums, which change nothing, and look at the rest while they run; None where the
    step is left to the plain path."""
    for _ in range(2):  # with the plan that there is, and with a new one
        found = find_plan(call)
        if found is None:
            return None
        try:
            begun = _launch_sums(call, found)
        except BaseException:
            if call.mechanism.kernels.newcomers is not None:
                call.mechanism.kernels.drop_plan()
            raise
        if begun is not None:
            return begun
        call.mechanism.kernels.drop_plan()
    return None


def _launch_sums(call: Call, found: Found) -> Begun | None:
    """Launch the sums; None if something is not where the plan says."""
    from mechanic.torch.kernels import launch

    mechanism, plan = call.mechanism, found.plan
    rates = _look_at_rates(call, plan)
    captured: list[Any] | None = None
    if is_capturing(mechanism.home):
        _refuse_to_capture_a_start(call, plan)
        captured = mechanism.kernels.captured
        captured += [plan, mechanism.scalars.packed, mechanism.counts.packed]
        captured += mechanism.history.lrs
    reads_x = tuner.reads_x(mechanism.options)
    if reads_x and not plan.placement.holds(call.optimizer):
        return None
    with torch.no_grad(), plan.on_device():
        inputs = _gather(call, plan, found.addresses, rates, captured)
        sections, arrivals = plan.layout.sum_sections, mechanism.kernels.arrivals
        if arrivals is not None:
            sections = arrivals.take_unsummed(has_all=found.has_arrived)
        launch.sum_up(plan, mechanism, inputs, sections)
    if not reads_x and not plan.placement.holds(call.optimizer):
        return None
    if plan.message is not None:
        inputs, rates = _tell_others(call, plan, plan.message, inputs, rates)
    return Begun(plan, found.addresses, inputs, rates)


def _refuse_to_capture_a_start(call: Call, plan: "Plan") -> None:
    if plan.message is not None and call.mechanism.history.is_starting:
        raise RuntimeError(
            "the first ten steps of an optimizer whose parameters are sharded cannot be captured "
            "in a CUDA graph: all processes have to know how many the tuner has learned from. Make "
            "ten steps first."
        )


def _tell_others(
    call: Call, plan: "Plan", message: Message, inputs: "Inputs", rates: StepRates
) -> tuple["Inputs", StepRates]:
    """Complete the sums over the processes that share the parameters. Nothing is sent before it is
    certain that the kernels make the step: a process on the plain path sends the same, once."""
    from mechanic.torch.kernels import launch

    with torch.no_grad(), plan.on_device():
        launch.tell(plan, call.mechanism, inputs, asks=rates.measures_update)
        numbers = begin_sum(message.ranks, message.parts)()
        newcomers = call.mechanism.kernels.newcomers
        if newcomers is not None:
            check_size(int(numbers[_NEW_D]), newcomers.size)
        if call.mechanism.process_group is None:
            return inputs, rates
        plan.question.ask(numbers[_MEASURES] > 0)  # the processes of a group need not be alike
        measures = plan.question.wait()
        rates = rates._replace(measures_update=measures, has_risen=Flag(measures))
        return inputs._replace(has_risen=plan.groups.place_flag(rates.has_risen)), rates


def _look_at_rates(call: Call, plan: "Plan") -> StepRates:
    history = call.mechanism.history
    rates = history.look(
        call.optimizer,
        proportional=is_proportional(call.base_step),
        is_relative=call.mechanism.options.s_init == "relative",
        half=plan.groups.half,
    )
    has_risen = rates.has_risen
    if has_risen.device in (None, plan.device):
        return rates
    has_risen = has_risen.wait()  # the learning rates are tensors on the host
    measures = rates.measures_update and (history.is_starting or has_risen.is_yes)
    return rates._replace(has_risen=has_risen, measures_update=measures)


def _gather(
    call: Call,
    plan: "Plan",
    addresses: list[int],
    rates: StepRates,
    captured: list[Any] | None,
) -> "Inputs":
    from mechanic.torch.kernels.launch import Inputs

    optimizer, groups, newcomers = call.optimizer, plan.groups, call.mechanism.kernels.newcomers
    return Inputs(
        grads=plan.gradients.place(addresses, captured),
        groups=groups.place(optimizer, rates.rates, addresses, captured),
        grad_scale=getattr(optimizer, "grad_scale", None),
        found_inf=call.found_inf,
        max_norm=groups.max_norm(call.mechanism.options.max_grad_norm, captured),
        has_risen=groups.place_flag(rates.has_risen),
        news=None if newcomers is None else newcomers.measure(plan.ranks, plan.device),
        copies={},
    )


def finish(call: Call, begun: Begun) -> Any:
    """Make the step that has begun."""
    mechanism, plan, rates = call.mechanism, begun.plan, begun.rates
    newcomers, mechanism.kernels.newcomers = mechanism.kernels.newcomers, None
    with torch.no_grad(), plan.on_device():
        copies = plan.copies
        result = _run_known(call, begun) if copies is None else _run_any(call, begun, copies)
        torch.autograd.graph.increment_version(plan.placement.written())
        mechanism.history.note(rates)
        _learn(call, begun)
        mechanism.counts.watch_device()
        effective_lrs = plan.groups.effective_lrs
        for group, rate in zip(call.optimizer.param_groups, effective_lrs, strict=True):
            group[EFFECTIVE_LR] = rate
        if newcomers is not None and plan.message is not None:
            # Where a step is skipped, other processes may see their part of them anew.
            plan.question.ask(plan.verdict[0])
            if not plan.question.wait():
                mechanism.kernels.drop_plan()
                newcomers.take_back()
    return result


def _learn(call: Call, begun: Begun) -> None:
    """Count a step that the tuner may have learned from; only the device knows whether it did."""
    history, plan = call.mechanism.history, begun.plan
    if plan.message is None:
        if any(not rate.live.is_no for rate in begun.rates.rates):
            history.learn(Flag(plan.verdict))
    elif history.is_starting:  # all processes have to know for how long sums are taken late
        is_live = plan.message.parts[_LIVE] > 0
        plan.question.ask((plan.verdict[0] != 0) & is_live)
        history.learn(Flag(plan.question.wait()))


def _run_known(call: Call, begun: Begun) -> Any:
    """The step of a base that is computed together with Mechanic's."""
    from mechanic.torch.kernels import launch

    mechanism, plan, inputs = call.mechanism, begun.plan, begun.inputs
    counters, with_u = plan.counters, begun.rates.measures_update
    may_skip = mechanism.options.skip_nonfinite or inputs.found_inf is not None
    is_asked = counters.is_on_host and may_skip
    if counters.is_on_host:
        counters.mirror()
    if with_u:
        launch.square_proposals(plan, mechanism, inputs, looks=False)
        if plan.message is not None:
            launch.tell_update(plan, plan.message.late)
            begin_sum(plan.message.ranks, plan.message.late)()
    launch.tune(plan, mechanism, inputs, with_u=with_u, looks=False)
    if is_asked:
        plan.question.ask(plan.verdict[0])
    launch.update(plan, inputs)
    if counters.is_on_host and (not is_asked or plan.question.wait()):
        counters.count(begun.addresses)
    return call.loss


def _run_any(call: Call, begun: Begun, copies: "PackedCopies") -> Any:
    """The step of a base that runs by itself, on copies of the parameters."""
    from mechanic.torch.kernels import launch

    mechanism, plan, inputs = call.mechanism, begun.plan, begun.inputs
    dg = plan.layout.partials[: plan.layout.total].sum()
    finite = skipping.is_finite(mechanism.options, dg, inputs.found_inf)
    is_asked = not finite.is_known and not skipping.skips_by_itself(call)
    if is_asked:
        plan.question.ask(finite.on(plan.device))
    with copies.allocated(call.optimizer):
        inputs = inputs._replace(copies=copies.memory)
        launch.copy_params(plan, copies.memory)
        if is_asked:
            finite = Flag(plan.question.wait())  # while the copy is made
        # The update of a base of which nothing is known may hold NaN whatever the gradients.
        looks = mechanism.options.skip_nonfinite and not is_proportional(call.base_step)
        looks = looks and not finite.is_no
        result, with_u = call.loss, looks or (begun.rates.measures_update and not finite.is_no)
        if not finite.is_no:
            twin = copies.twin
            twin.prepare(call.optimizer, begun.rates.rates)
            if not is_familiar(call):
                copies.count_references()
            with skipping.by_base(twin.optimizer, [], finite), torch.enable_grad():
                result = call.run_base(twin.optimizer)
            twin.take_over(call.optimizer)
            copies.gather()
        if with_u:
            launch.square_proposals(plan, mechanism, inputs, looks=looks)
        launch.tune(plan, mechanism, inputs, with_u=with_u, looks=looks)
        launch.move(plan, inputs)
    return result
