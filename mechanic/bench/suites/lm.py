"""Language modelling: a GPT on bytes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from mechanic.bench.data import Data
from mechanic.bench.suites import corpus
from mechanic.bench.suites.shared import bfloat16, not_installed
from mechanic.bench.task import (
    Budget,
    BuildSettings,
    Problem,
    Task,
    constant,
    cosine,
    half_decades,
)


@dataclass(frozen=True)
class GptSize:
    """The size of the model and of the run."""

    layers: int
    width: int
    context: int
    batch: int
    steps: int
    evaluated: int
    """The number of windows to evaluate, of the train text and of the validation text each."""


SIZES: dict[Budget, GptSize] = {
    "smoke": GptSize(2, 32, 32, batch=16, steps=8, evaluated=16),
    "short": GptSize(6, 384, 256, batch=64, steps=600, evaluated=256),
    "full": GptSize(12, 768, 1024, batch=32, steps=20_000, evaluated=256),  # GPT-2's smallest
}
HEAD = 64  # width of an attention head
HYPERPARAMETERS = {"adamw": {"betas": (0.9, 0.95), "weight_decay": 0.1}}


def tasks(data: Data) -> list[Task]:
    """One model on the chosen corpus, with a cosine and at a constant learning rate."""
    return [
        _task(data, "", _build, "cosine with 5 % warm-up"),
        _task(data, "-constant", _build_constant, "constant lr with 5 % warm-up"),
    ]


def _task(
    data: Data, suffix: str, build: Callable[[BuildSettings], Problem], schedule: str
) -> Task:
    name = data.corpus_name()
    return Task(
        "lm",
        f"gpt-{name}{suffix}",
        {"adamw": half_decades(-5, -1)},
        build,
        "test_loss",
        f"GPT on the bytes of {name}; {schedule}, clip 1",
        ("text", name),
        data.missing("text", name) or not_installed("transformers"),
    )


def _build_constant(settings: BuildSettings) -> Problem:
    return replace(_build(settings), schedule=constant(0.05))


def _build(settings: BuildSettings) -> Problem:
    size = SIZES[settings.budget]
    tokens = corpus.of_bytes(settings.data, corpus.MAX_CHARACTERS[settings.budget], settings.device)
    torch.manual_seed(settings.seed)
    model = _gpt(size, tokens.vocabulary).to(settings.device)
    # One more than the context: every byte but the last is read, every byte but the first is
    # predicted.
    length = size.context + 1
    samples = {
        "train_loss": corpus.spread_windows(tokens.train, length, size.evaluated),
        "test_loss": corpus.spread_windows(tokens.valid, length, size.evaluated),
    }
    return Problem(
        model,
        batches=corpus.random_windows(tokens.train, length, size.batch, settings.seed),
        loss=partial(_loss, model),
        evaluate=partial(_evaluate, model, samples, size.batch),
        steps=size.steps,
        schedule=cosine(0.05),
        hyperparameters=HYPERPARAMETERS,
        clip=1.0,
        autocast=True,
    )


def _gpt(size: GptSize, vocabulary: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    # No dropout, since the paper found that Mechanic does not work well with it.
    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=size.context,
        n_embd=size.width,
        n_layer=size.layers,
        n_head=max(1, size.width // HEAD),
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return GPT2LMHeadModel(config)  # type: ignore[no-untyped-call]


def _loss(model: nn.Module, windows: Tensor) -> Tensor:
    logits: Tensor = model(windows[:, :-1]).logits
    return cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())


def _evaluate(model: nn.Module, samples: Mapping[str, Tensor], batch: int) -> dict[str, float]:
    def mean(windows: Tensor) -> float:
        with bfloat16(windows.device):
            losses: list[Any] = [_loss(model, part) for part in torch.split(windows, batch)]
        return float(torch.stack(losses).mean())

    return {name: mean(windows) for name, windows in samples.items()}
