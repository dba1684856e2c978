"""Reinforcement learning: PPO (Schulman et al., 2017) on two small environments.

What is scored is minus the mean return of an episode, because low is good in the bench. The excess
is then the part of the return gained by the best of the sweep that a method has missed.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from mechanic.bench.data import Data
from mechanic.bench.suites.control import CartPole, Environment, Pendulum
from mechanic.bench.task import Budget, BuildSettings, Problem, Task, constant, half_decades


class Arena(NamedTuple):
    """An environment, and how it is learned."""

    environment: Environment
    discount: float
    length: float
    """A factor of the number of rounds: an environment that is solved has nothing to compare."""


ARENAS = {"pendulum": Arena(Pendulum(), 0.95, 1.0), "cartpole": Arena(CartPole(), 0.99, 0.25)}


@dataclass(frozen=True)
class PpoSize:
    """The size of the networks and of the run."""

    width: int
    copies: int
    """Environments that run side by side."""
    horizon: int
    """Their steps between two trainings of the policy."""
    rounds: int
    episodes: int
    """The episodes to evaluate."""


SIZES: dict[Budget, PpoSize] = {
    "smoke": PpoSize(16, copies=8, horizon=8, rounds=1, episodes=8),
    "short": PpoSize(64, copies=64, horizon=64, rounds=60, episodes=256),
    "full": PpoSize(64, copies=256, horizon=64, rounds=500, episodes=1024),
}
REWARD_SCALE = 0.1  # for values of about 1 to 10
EPOCHS, PARTS = 4, 4  # passes over what was seen, and minibatches in each
SMOOTHING, RATIO, VALUE_WEIGHT, ENTROPY_WEIGHT = 0.95, 0.2, 0.5, 0.001


def tasks(data: Data) -> list[Task]:
    """The environments need no data."""
    return [
        Task(
            "rl",
            f"ppo-{name}",
            {"adamw": half_decades(-5, -1)},
            partial(_build, name),
            "greedy_return",
            f"PPO on {name}; minus the mean return is scored; constant lr, clip 0.5",
            uses=None,
        )
        for name in ARENAS
    ]


def _build(name: str, settings: BuildSettings) -> Problem:
    size, arena = SIZES[settings.budget], ARENAS[name]
    torch.manual_seed(settings.seed)
    model = ActorCritic(arena.environment, size.width).to(settings.device)
    return Problem(
        model,
        batches=_batches(arena, model, size, settings),
        loss=partial(_loss, model),
        evaluate=partial(_evaluate, model, size.episodes, settings.device),
        steps=math.ceil(arena.length * size.rounds) * EPOCHS * PARTS,
        schedule=constant(),
        clip=0.5,
    )


class ActorCritic(nn.Module):
    """A policy and an estimate of the return, as two networks."""

    def __init__(self, environment: Environment, width: int) -> None:
        super().__init__()
        self.environment = environment
        self.actor = _network(environment.observed, width, environment.outputs, 0.01)
        self.critic = _network(environment.observed, width, 1, 1.0)
        if not environment.discrete:
            self.log_spread = nn.Parameter(torch.zeros(()))

    def value(self, observation: Tensor) -> Tensor:
        """The return that is expected from here on."""
        value: Tensor = self.critic(observation).squeeze(-1)
        return value

    def act(self, observation: Tensor, generator: torch.Generator | None) -> Tensor:
        """An action that is drawn from the policy; without a generator, the most likely one."""
        found: Tensor = self.actor(observation)
        if not self.environment.discrete:
            mean = found.squeeze(-1)
            if generator is None:
                return mean
            noise = torch.randn(mean.shape, generator=generator, device=mean.device)
            return mean + self.log_spread.exp() * noise
        if generator is not None:
            chance = torch.rand(found.shape, generator=generator, device=found.device)
            found = found - (-chance.clamp_min(1e-20).log()).log()  # Gumbel's way to draw
        return found.argmax(-1)

    def judge(self, observation: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """The log-probability of each action, and the entropy of the policy."""
        found = self.actor(observation)
        if self.environment.discrete:
            logs = found.log_softmax(-1)
            chosen = logs.gather(-1, action[..., None]).squeeze(-1)
            return chosen, -(logs.exp() * logs).sum(-1)
        distance = (action - found.squeeze(-1)) / self.log_spread.exp()
        constant_part = self.log_spread + 0.5 * math.log(2 * math.pi)
        return -0.5 * distance**2 - constant_part, constant_part + 0.5


def _network(inputs: int, width: int, outputs: int, last_gain: float) -> nn.Sequential:
    layers = [nn.Linear(inputs, width), nn.Linear(width, width), nn.Linear(width, outputs)]
    for layer, gain in zip(layers, (math.sqrt(2), math.sqrt(2), last_gain), strict=True):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


class Experience(NamedTuple):
    """What was seen and done, and how it went, with a first dimension of steps or of examples."""

    observation: Tensor
    action: Tensor
    log_probability: Tensor
    """Of the action, by the policy that took it."""
    advantage: Tensor
    target: Tensor
    """For the critic."""


def _batches(
    arena: Arena, model: ActorCritic, size: PpoSize, settings: BuildSettings
) -> Iterator[Experience]:
    """Minibatches of what the policy, as it is at that time, does in the environment."""
    environment = arena.environment
    generator = torch.Generator(settings.device).manual_seed(settings.seed)
    state = environment.reset(size.copies, generator)
    # Spread over an episode, so that the copies do not all begin anew in the same step.
    age = torch.arange(size.copies, device=settings.device) * environment.limit // size.copies
    while True:
        seen: list[tuple[Tensor, ...]] = []
        with torch.no_grad():
            for _ in range(size.horizon):
                observation = environment.observe(state)
                action = model.act(observation, generator)
                state, reward, over = environment.step(state, action)
                age = age + 1
                ended = over | (age >= environment.limit)
                following = environment.observe(state)
                seen.append((observation, action, reward, over, ended, following))
                fresh = environment.reset(size.copies, generator)
                state, age = torch.where(ended[:, None], fresh, state), age * ~ended
            experience = _learned_from(
                model, arena.discount, *map(torch.stack, zip(*seen, strict=True))
            )
        for _ in range(EPOCHS):
            count = size.copies * size.horizon
            order = torch.randperm(count, generator=generator, device=settings.device)
            for index in order.chunk(PARTS):
                yield Experience(*(part[index] for part in experience))


def _learned_from(
    model: ActorCritic,
    discount: float,
    observation: Tensor,
    action: Tensor,
    reward: Tensor,
    over: Tensor,
    ended: Tensor,
    following: Tensor,
) -> Experience:
    """Generalised advantages (Schulman et al., 2016). An episode that only ran out of time would
    have gone on: its last state keeps its value."""
    value = model.value(observation)
    surprise = REWARD_SCALE * reward + discount * ~over * model.value(following) - value
    advantage = torch.zeros_like(surprise)
    later = torch.zeros_like(surprise[0])
    for step in reversed(range(len(surprise))):
        later = surprise[step] + discount * SMOOTHING * ~ended[step] * later
        advantage[step] = later
    log_probability, _ = model.judge(observation, action)
    whole = Experience(observation, action, log_probability, advantage, advantage + value)
    return Experience(*(part.flatten(0, 1) for part in whole))


def _loss(model: ActorCritic, batch: Experience) -> Tensor:
    log_probability, entropy = model.judge(batch.observation, batch.action)
    ratio = (log_probability - batch.log_probability).exp()
    advantage = (batch.advantage - batch.advantage.mean()) / (batch.advantage.std() + 1e-8)
    clipped = ratio.clamp(1 - RATIO, 1 + RATIO)
    gained = torch.minimum(ratio * advantage, clipped * advantage).mean()
    missed = mse_loss(model.value(batch.observation), batch.target)
    return VALUE_WEIGHT * missed - gained - ENTROPY_WEIGHT * entropy.mean()


def _evaluate(model: ActorCritic, episodes: int, device: torch.device) -> Mapping[str, float]:
    generator = torch.Generator(device).manual_seed(0)
    drawn = _mean_return(model, episodes, generator, generator)
    greedy = _mean_return(model, episodes, generator, None)
    return {"train_loss": -drawn, "mean_return": drawn, "greedy_return": greedy}


def _mean_return(
    model: ActorCritic, episodes: int, starts: torch.Generator, actions: torch.Generator | None
) -> float:
    environment = model.environment
    state = environment.reset(episodes, starts)
    lasts = torch.ones(episodes, dtype=torch.bool, device=state.device)
    total = torch.zeros(episodes, device=state.device)
    for _ in range(environment.limit):
        action = model.act(environment.observe(state), actions)
        state, reward, over = environment.step(state, action)
        total += reward * lasts
        lasts = lasts & ~over
    return float(total.mean())
