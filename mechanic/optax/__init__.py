"""Mechanic for optax: `mechanize` tunes a transformation, and the readers look into its state."""

from mechanic.optax.readers import effective_learning_rate, eval_params, metrics, scale
from mechanic.optax.state import MechanicState
from mechanic.optax.transform import mechanize

__all__ = [
    "MechanicState",
    "effective_learning_rate",
    "eval_params",
    "mechanize",
    "metrics",
    "scale",
]
