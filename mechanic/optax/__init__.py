"""Mechanic for optax: `mechanize` tunes a transformation, and the readers look into its state."""

try:
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
except ModuleNotFoundError as error:
    if error.name not in ("jax", "optax"):
        raise
    fix = "pip install jax optax"
    raise ModuleNotFoundError(
        f"mechanic.optax needs {error.name}: {fix}", name=error.name
    ) from None

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
