"""Language modelling in JAX: a GPT on bytes, trained with optax."""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from mechanic.bench.data import Data
from mechanic.bench.optax_run import device_of
from mechanic.bench.suites import corpus, lm
from mechanic.bench.suites.lm import GptSize
from mechanic.bench.suites.shared import not_installed
from mechanic.bench.task import Budget, BuildSettings, OptaxProblem, Task, cosine, half_decades

SIZES: dict[Budget, GptSize] = {
    "smoke": lm.SIZES["smoke"],
    "short": GptSize(2, 64, 64, batch=16, steps=600, evaluated=128),  # half a minute on one core
    "full": lm.SIZES["short"],  # for a GPU
}
HEAD = 32  # width of an attention head


def tasks(data: Data) -> list[Task]:
    """One model on the chosen corpus."""
    name = data.corpus_name()
    missing = (
        not_installed("optax") and 'optax is not installed: pip install ".[optax]" in a clone.'
    )
    return [
        Task(
            "jax",
            f"gpt-optax-{name}",
            {"adamw": half_decades(-4, -1)},
            _build,
            "test_loss",
            f"GPT in JAX on the bytes of {name}; cosine with 5 % warm-up, clip 1",
            ("text", name),
            data.missing("text", name) or missing,
            library="optax",
        )
    ]


def _build(settings: BuildSettings) -> OptaxProblem:
    size, device = SIZES[settings.budget], device_of(settings.device)
    import jax

    # The text stays on the host: a step takes its batch along.
    limit = corpus.MAX_CHARACTERS[settings.budget]
    tokens = corpus.of_bytes(settings.data, limit, torch.device("cpu"))
    length = size.context + 1
    samples = {
        "train_loss": corpus.spread_windows(tokens.train, length, size.evaluated),
        "test_loss": corpus.spread_windows(tokens.valid, length, size.evaluated),
    }
    with jax.default_device(device):
        params = _new_params(size, tokens.vocabulary)(settings.seed)
    return OptaxProblem(
        params,
        batches=_arrays(corpus.random_windows(tokens.train, length, size.batch, settings.seed)),
        loss=_loss(size.width),
        evaluate=partial(_evaluate, size, samples),
        steps=size.steps,
        schedule=cosine(0.05),
        hyperparameters=lm.HYPERPARAMETERS,
        clip=1.0,
    )


def _arrays(batches: Iterator[Tensor]) -> Iterator[Any]:
    return (batch.int().numpy() for batch in batches)


@cache
def _new_params(size: GptSize, vocabulary: int) -> Callable[[int], dict[str, Any]]:
    import jax

    return jax.jit(lambda seed: _drawn(size, vocabulary, jax.random.key(seed)))


def _drawn(size: GptSize, vocabulary: int, key: Any) -> dict[str, Any]:
    """Weights as GPT-2 has them; those of all blocks are stacked."""
    import jax
    import jax.numpy as jnp

    keys = iter(jax.random.split(key, 6))
    width, layers, spread = size.width, size.layers, 0.02

    def weights(*shape: int, spread: float = spread) -> Any:
        return spread * jax.random.normal(next(keys), shape)

    def norm(*shape: int) -> dict[str, Any]:
        return {"scale": jnp.ones(shape), "shift": jnp.zeros(shape)}

    def linear(inside: int, outside: int, spread: float = spread) -> dict[str, Any]:
        kernel = weights(layers, inside, outside, spread=spread)
        return {"kernel": kernel, "bias": jnp.zeros((layers, outside))}

    into_sum = spread / math.sqrt(2 * layers)  # two from each block add up
    return {
        "tokens": weights(vocabulary, width),
        "places": weights(size.context, width),
        "blocks": {
            "norm": norm(layers, width),
            "heads": linear(width, 3 * width),
            "joined": linear(width, width, into_sum),
            "second_norm": norm(layers, width),
            "hidden": linear(width, 4 * width),
            "out": linear(4 * width, width, into_sum),
        },
        "norm": norm(width),
    }


def _logits(width: int, params: Any, tokens: Any) -> Any:
    """Pre-norm blocks, causal attention, and the embedding of the tokens as output layer."""
    import jax
    import jax.numpy as jnp

    def norm(x: Any, own: Any) -> Any:
        return jax.nn.standardize(x, epsilon=1e-5) * own["scale"] + own["shift"]

    def linear(x: Any, own: Any) -> Any:
        return x @ own["kernel"] + own["bias"]

    def block(x: Any, own: Any) -> tuple[Any, None]:
        split = (*x.shape[:2], max(1, width // HEAD), -1)
        parts = jnp.split(linear(norm(x, own["norm"]), own["heads"]), 3, axis=-1)
        query, key, value = (part.reshape(split) for part in parts)
        seen = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        x = x + linear(seen.reshape(x.shape), own["joined"])
        hidden = jax.nn.gelu(linear(norm(x, own["second_norm"]), own["hidden"]))
        return x + linear(hidden, own["out"]), None

    x = params["tokens"][tokens] + params["places"][: tokens.shape[1]]
    x, _ = jax.lax.scan(block, x, params["blocks"])
    return norm(x, params["norm"]) @ params["tokens"].T


@cache
def _loss(width: int) -> Callable[[Any, Any], Any]:
    """The same function for the same model, so that it is compiled once."""
    import jax
    import optax

    def loss(params: Any, windows: Any) -> Any:
        logits = _logits(width, params, windows[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()

    return jax.jit(loss)


def _evaluate(size: GptSize, samples: Mapping[str, Tensor], params: Any) -> dict[str, float]:
    loss = _loss(size.width)

    def mean(windows: Tensor) -> float:
        parts = _arrays(iter(torch.split(windows, size.batch)))
        losses = [float(loss(params, part)) for part in parts]
        return sum(losses) / len(losses)

    return {name: mean(windows) for name, windows in samples.items()}
