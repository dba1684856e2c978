"""Two small environments as functions of tensors: many copies run at once, on any device.

Both have the physics, the rewards and the limits of Gymnasium's environments of the same name.
"""

import math
from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor


class Step(NamedTuple):
    """What follows from an action, for each copy."""

    state: Tensor
    reward: Tensor
    over: Tensor
    """Whether the episode has come to an end other than by its time."""


class Environment(ABC):
    """An environment whose whole state is one row of a tensor."""

    observed: int
    """The number of values that the policy sees."""
    outputs: int
    """The number of values that the policy returns: one for each action, or a mean."""
    discrete: bool
    limit: int
    """The number of steps after which an episode ends."""

    @abstractmethod
    def reset(self, count: int, generator: torch.Generator) -> Tensor:
        """The states in which episodes begin."""

    @abstractmethod
    def observe(self, state: Tensor) -> Tensor:
        """What the policy sees of a state."""

    @abstractmethod
    def step(self, state: Tensor, action: Tensor) -> Step:
        """Let time pass. An action is an index or, where it is not discrete, a number."""


def _uniform(count: int, bounds: tuple[float, ...], generator: torch.Generator) -> Tensor:
    drawn = torch.rand(count, len(bounds), generator=generator, device=generator.device)
    return (2 * drawn - 1) * torch.tensor(bounds, device=generator.device)


class CartPole(Environment):
    """A pole on a cart that is pushed to the left or to the right: one point for each step until
    the pole has fallen or the cart has left the track (Barto, Sutton and Anderson, 1983)."""

    observed, outputs, discrete, limit = 4, 2, True, 500
    gravity, pole_mass, total_mass, half_length = 9.8, 0.1, 1.1, 0.5
    force, seconds = 10.0, 0.02
    track, tilt = 2.4, math.radians(12)

    def reset(self, count: int, generator: torch.Generator) -> Tensor:
        """Nearly upright, nearly at rest."""
        return _uniform(count, (0.05,) * 4, generator)

    def observe(self, state: Tensor) -> Tensor:
        """All of it: the cart's place and speed, the pole's angle and speed."""
        return state

    def step(self, state: Tensor, action: Tensor) -> Step:
        """One step of Euler's method."""
        place, speed, angle, turn = state.unbind(1)
        push = self.force * (2.0 * action - 1)
        sine, cosine = angle.sin(), angle.cos()
        without_pole = (push + self.pole_mass * self.half_length * turn**2 * sine) / self.total_mass
        inertia = self.half_length * (4 / 3 - self.pole_mass * cosine**2 / self.total_mass)
        spin = (self.gravity * sine - cosine * without_pole) / inertia
        push_back = self.pole_mass * self.half_length * spin * cosine / self.total_mass
        rates = torch.stack([speed, without_pole - push_back, turn, spin], 1)
        state = state + self.seconds * rates
        over = (state[:, 0].abs() > self.track) | (state[:, 2].abs() > self.tilt)
        return Step(state, torch.ones_like(place), over)


class Pendulum(Environment):
    """A pendulum that is to be swung up and held there by a weak motor. Each step costs the square
    of the angle, and a little for speed and torque."""

    observed, outputs, discrete, limit = 3, 1, False, 200
    gravity, fastest, strongest, seconds = 10.0, 8.0, 2.0, 0.05

    def reset(self, count: int, generator: torch.Generator) -> Tensor:
        """At any angle."""
        return _uniform(count, (math.pi, 1.0), generator)

    def observe(self, state: Tensor) -> Tensor:
        """The direction, which does not jump as the angle does, and the speed."""
        return torch.stack([state[:, 0].cos(), state[:, 0].sin(), state[:, 1]], 1)

    def step(self, state: Tensor, action: Tensor) -> Step:
        """One step of the half-implicit method of Euler."""
        angle, speed = state.unbind(1)
        torque = action.clamp(-self.strongest, self.strongest)
        tilt = torch.remainder(angle + math.pi, 2 * math.pi) - math.pi
        cost = tilt**2 + 0.1 * speed**2 + 0.001 * torque**2
        pull = 1.5 * self.gravity * angle.sin() + 3 * torque  # a rod of mass 1 and length 1
        speed = (speed + self.seconds * pull).clamp(-self.fastest, self.fastest)
        state = torch.stack([angle + self.seconds * speed, speed], 1)
        return Step(state, -cost, torch.zeros_like(cost, dtype=torch.bool))
