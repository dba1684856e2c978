"""Mechanic for optax: `mechanize` tunes a transformation, and the readers look into its state."""

from mechanic.optax.readers import (
    effective_learning_rate,
    eval_params,
    freeze,
    metrics,
    scale,
    suggest_lr,
    unfreeze,
)
from mechanic.optax.scoped import scopes
from mechanic.optax.state import MechanicState
from mechanic.optax.transform import mechanize

__all__ = [
    "MechanicState",
    "effective_learning_rate",
    "eval_params",
    "freeze",
    "mechanize",
    "metrics",
    "scale",
    "scopes",
    "suggest_lr",
    "unfreeze",
]
