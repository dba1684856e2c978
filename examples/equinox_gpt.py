"""A small GPT in equinox, trained with optax.adamw and no learning rate to choose.

    python examples/equinox_gpt.py --steps 200

It learns to count: each line of its text is a number of four digits and the one after it.
"""

import argparse
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from mechanic.optax import mechanize, scale, suggest_lr

CHARACTERS = "0123456789 \n"
TEXT = "".join(f"{n:04} {n + 1:04}\n" for n in range(9999))
TOKENS = np.array([CHARACTERS.index(c) for c in TEXT], np.int32)
CONTEXT, WIDTH, LAYERS, HEADS, BATCH = 40, 32, 2, 4, 16


class Block(eqx.Module):
    norms: tuple[eqx.nn.LayerNorm, eqx.nn.LayerNorm]
    attention: eqx.nn.MultiheadAttention
    network: eqx.nn.MLP

    def __init__(self, key: Any) -> None:
        one, two = jax.random.split(key)
        self.norms = eqx.nn.LayerNorm(WIDTH), eqx.nn.LayerNorm(WIDTH)
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=one)
        self.network = eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, 1, jax.nn.gelu, key=two)

    def __call__(self, x: Any, mask: Any) -> Any:
        own = jax.vmap(self.norms[0])(x)
        x = x + self.attention(own, own, own, mask=mask)
        return x + jax.vmap(self.network)(jax.vmap(self.norms[1])(x))


class Gpt(eqx.Module):
    tokens: eqx.nn.Embedding
    places: jax.Array
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    out: eqx.nn.Linear

    def __init__(self, key: Any) -> None:
        one, two, *keys = jax.random.split(key, LAYERS + 2)
        self.tokens = eqx.nn.Embedding(len(CHARACTERS), WIDTH, key=one)
        self.places = jnp.zeros((CONTEXT, WIDTH))
        self.blocks = [Block(own) for own in keys]
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.out = eqx.nn.Linear(WIDTH, len(CHARACTERS), key=two)

    def __call__(self, tokens: Any) -> Any:
        x = jax.vmap(self.tokens)(tokens) + self.places
        mask = jnp.tril(jnp.ones((CONTEXT, CONTEXT), bool))
        for block in self.blocks:
            x = block(x, mask)
        return jax.vmap(self.out)(jax.vmap(self.norm)(x))


def loss_of(model: Gpt, tokens: Any) -> Any:
    logits = jax.vmap(model)(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    shape = optax.cosine_decay_schedule(1.0, args.steps)  # any size will do: only its shape counts
    tx = mechanize(optax.adamw(shape), learning_rate=shape)  # the one line
    model, draw = Gpt(jax.random.key(args.seed)), np.random.default_rng(args.seed)
    state = tx.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit(donate="all")
    def train_step(model: Gpt, state: Any, tokens: Any) -> tuple[Gpt, Any, Any]:
        value, grads = eqx.filter_value_and_grad(loss_of)(model, tokens)
        updates, state = tx.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), state, value

    for step in range(1, args.steps + 1):
        starts = draw.integers(0, len(TOKENS) - CONTEXT - 1, BATCH)
        tokens = jnp.asarray(np.stack([TOKENS[s : s + CONTEXT + 1] for s in starts]))
        model, state, loss = train_step(model, state, tokens)
        if step % max(args.steps // 10, 1) == 0:
            print(f"step {step:5}  loss {loss:.3f}  scale {scale(state):.3g}")
    print(f"the peak to type for adamw alone: {suggest_lr(state):.3g}")


if __name__ == "__main__":
    main()
