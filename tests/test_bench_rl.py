"""The suite `rl`: its environments are Gymnasium's, and its PPO is the one of the papers."""

import math

import gymnasium
import numpy as np
import pytest
import torch
from torch.distributions import Categorical, Normal

from mechanic.bench.data import Data
from mechanic.bench.suites import SUITES, rl
from mechanic.bench.suites.control import CartPole, Environment, Pendulum
from mechanic.bench.task import BuildSettings

CPU = torch.device("cpu")
NAMES = {"CartPole-v1": CartPole(), "Pendulum-v1": Pendulum()}
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", NAMES)
def test_the_physics_are_gymnasiums(name: str) -> None:
    """From 20 states, for as long as Gymnasium lets the episode last."""
    environment, theirs = NAMES[name], gymnasium.make(name).unwrapped
    generator = torch.Generator().manual_seed(0)
    steps = 0
    for state in environment.reset(20, generator).double():
        theirs.reset(seed=0)
        theirs.state = state.numpy().copy()
        state = state[None]
        for _ in range(60):
            action = action_for(environment, generator)
            state, reward, over = environment.step(state, action)
            given = action.numpy()[0] if environment.discrete else action.numpy()
            seen, their_reward, terminated, *_ = theirs.step(given)
            np.testing.assert_allclose(theirs.state, state[0], rtol=1e-9, atol=1e-12)
            np.testing.assert_allclose(seen, environment.observe(state)[0], rtol=1e-6, atol=1e-6)
            assert float(reward) == pytest.approx(float(their_reward), rel=1e-9)
            assert bool(over) == terminated
            steps += 1
            if terminated:
                break
    assert steps > 200
    assert gymnasium.spec(name).max_episode_steps == environment.limit


def action_for(environment: Environment, generator: torch.Generator) -> torch.Tensor:
    if environment.discrete:
        return torch.randint(2, (1,), generator=generator)
    return 3 * torch.randn(1, generator=generator, dtype=torch.double)  # too strong at times


@pytest.mark.parametrize("name", NAMES)
def test_episodes_begin_as_gymnasiums_do(name: str) -> None:
    environment, theirs = NAMES[name], gymnasium.make(name)
    mine = environment.reset(2000, torch.Generator().manual_seed(0))
    drawn = np.stack([theirs.reset(seed=seed)[0] for seed in range(2000)])
    np.testing.assert_allclose(environment.observe(mine).mean(0), drawn.mean(0), atol=0.08)
    np.testing.assert_allclose(environment.observe(mine).std(0), drawn.std(0), rtol=0.1)


@pytest.mark.parametrize("environment", NAMES.values(), ids=NAMES)
def test_actions_are_drawn_and_judged_as_torch_does(environment: Environment) -> None:
    torch.manual_seed(0)
    model = rl.ActorCritic(environment, 16)
    for weights in model.actor[-1].parameters():
        torch.nn.init.normal_(weights)
    model.requires_grad_(False)
    seen = torch.randn(1, environment.observed).expand(20_000, -1)
    found = model.actor(seen)
    if environment.discrete:
        truth = Categorical(logits=found)
    else:
        torch.nn.init.constant_(model.log_spread, -0.7)
        truth = Normal(found.squeeze(-1), math.exp(-0.7))
    action = model.act(seen, torch.Generator().manual_seed(1))
    chances, entropy = model.judge(seen, action)
    torch.testing.assert_close(chances, truth.log_prob(action))
    torch.testing.assert_close(entropy.expand(20_000), truth.entropy())
    assert action.double().mean().item() == pytest.approx(
        float(truth.probs[0, 1]) if environment.discrete else truth.mean[0].item(), abs=0.02
    )
    greedy = model.act(seen, None)
    assert torch.equal(greedy, truth.probs.argmax(-1) if environment.discrete else truth.mean)


def test_advantages_by_their_definition() -> None:
    """The sum of all later surprises of the episode, each discounted; in float64, term by term."""
    torch.manual_seed(0)
    model = rl.ActorCritic(CartPole(), 8).double()
    steps, copies, discount = 12, 5, 0.9
    seen, following = torch.randn(2, steps, copies, 4).double()
    action = torch.randint(2, (steps, copies))
    reward = torch.randn(steps, copies).double()
    over = torch.rand(steps, copies) < 0.15
    ended = over | (torch.rand(steps, copies) < 0.15)  # some only ran out of time
    assert over.any()
    assert (ended & ~over).any()
    with torch.no_grad():
        found = rl._learned_from(model, discount, seen, action, reward, over, ended, following)
        value, next_value = model.value(seen), model.value(following)
    for copy in range(copies):
        for start in range(steps):
            total, weight = 0.0, 1.0
            for k in range(start, steps):
                later = 0.0 if over[k, copy] else discount * next_value[k, copy].item()
                scaled = rl.REWARD_SCALE * reward[k, copy].item()
                total += weight * (scaled + later - value[k, copy].item())
                weight *= discount * rl.SMOOTHING
                if ended[k, copy]:
                    break
            place = start * copies + copy
            assert found.advantage[place].item() == pytest.approx(total)
            assert found.target[place].item() == pytest.approx(total + value[start, copy].item())


def test_the_return_ends_with_the_episode() -> None:
    """As Gymnasium counts it, for a policy that pushes to one side until the pole falls."""
    torch.manual_seed(0)
    model = rl.ActorCritic(CartPole(), 8)
    with torch.no_grad():
        model.actor[-1].weight.zero_()
        model.actor[-1].bias.copy_(torch.tensor([0.0, 1.0]))
    starts = CartPole().reset(16, torch.Generator().manual_seed(0))
    theirs = gymnasium.make("CartPole-v1").unwrapped
    totals = []
    for start in starts.double().numpy():
        theirs.reset(seed=0)
        theirs.state, total, terminated = start.copy(), 0.0, False
        while not terminated:
            _, reward, terminated, *_ = theirs.step(1)
            total += float(reward)
        totals.append(total)
    mine = rl._mean_return(model, 16, torch.Generator().manual_seed(0), None)
    assert mine == pytest.approx(np.mean(totals))


@pytest.mark.nightly
def test_ppo_learns_to_balance_and_the_score_is_minus_the_return(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size = rl.PpoSize(32, copies=32, horizon=32, rounds=40, episodes=64)
    monkeypatch.setitem(rl.SIZES, "short", size)
    task = next(task for task in SUITES["rl"](Data()) if task.name == "ppo-cartpole")
    problem = task.build(BuildSettings("short", 0, CPU, Data()))
    with torch.no_grad():
        before = problem.evaluate()
    optimizer = torch.optim.Adam(problem.parameters(), lr=0.01)
    for _ in range(problem.steps):
        optimizer.zero_grad()
        problem.loss(next(problem.batches)).backward()
        torch.nn.utils.clip_grad_norm_(problem.parameters(), 0.5)
        optimizer.step()
    with torch.no_grad():
        after = problem.evaluate()
    assert after["train_loss"] == -after["mean_return"]
    assert after["mean_return"] > 3 * before["mean_return"]
