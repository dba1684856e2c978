"""A small GPT in flax, trained with optax.adamw and no learning rate to choose.

    python examples/flax_gpt.py --steps 200

It learns to write the numbers from 0 to 999 as words, one after the other, character by character.
"""

import argparse
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

from mechanic.optax import mechanize, scale, suggest_lr

ONES = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen"
ONES += " fifteen sixteen seventeen eighteen nineteen"
TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
CONTEXT, WIDTH, LAYERS, HEADS, BATCH = 32, 32, 2, 4, 16


def in_words(number: int) -> str:
    ones, tens = ONES.split(), TENS.split()
    if number < 20:
        return ones[number]
    if number < 100:
        rest = number % 10
        return tens[number // 10 - 2] + (f"-{ones[rest]}" if rest else "")
    rest = number % 100
    return f"{ones[number // 100]} hundred" + (f" {in_words(rest)}" if rest else "")


TEXT = ", ".join(map(in_words, range(1000)))
CHARACTERS = sorted(set(TEXT))
TOKENS = np.array([CHARACTERS.index(c) for c in TEXT], np.int32)


class Gpt(nn.Module):
    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        places = self.param("places", nn.initializers.normal(0.02), (CONTEXT, WIDTH))
        x = nn.Embed(len(CHARACTERS), WIDTH, embedding_init=nn.initializers.normal(0.02))(tokens)
        x, mask = x + places, nn.make_causal_mask(tokens)
        for _ in range(LAYERS):
            x = x + nn.MultiHeadDotProductAttention(HEADS)(nn.LayerNorm()(x), mask=mask)
            hidden = nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x)))
            x = x + nn.Dense(WIDTH)(hidden)
        return nn.Dense(len(CHARACTERS))(nn.LayerNorm()(x))


@partial(jax.jit, donate_argnums=0)
def train_step(state: TrainState, tokens: Any) -> tuple[TrainState, Any]:
    def loss(params: Any) -> Any:
        logits = state.apply_fn(params, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    value, grads = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=grads), value


def batch(draw: np.random.Generator) -> Any:
    starts = draw.integers(0, len(TOKENS) - CONTEXT - 1, BATCH)
    return jnp.asarray(np.stack([TOKENS[s : s + CONTEXT + 1] for s in starts]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    shape = optax.cosine_decay_schedule(1.0, args.steps)  # any size will do: only its shape counts
    tx = mechanize(optax.adamw(shape), learning_rate=shape)  # the one line
    model, draw = Gpt(), np.random.default_rng(args.seed)
    params = model.init(jax.random.key(args.seed), batch(draw)[:, :-1])
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    for step in range(1, args.steps + 1):
        state, loss = train_step(state, batch(draw))
        if step % max(args.steps // 10, 1) == 0:
            print(f"step {step:5}  loss {loss:.3f}  scale {scale(state.opt_state):.3g}")
    print(f"the peak to type for adamw alone: {suggest_lr(state.opt_state):.3g}")


if __name__ == "__main__":
    main()
