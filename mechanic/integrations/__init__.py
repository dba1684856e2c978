"""Mechanic in trainers and loggers: `metrics` has the numbers to log, under the same names
everywhere. The callbacks are in modules named after their trainers, which import them."""

from mechanic.integrations.logged import metrics

__all__ = ["metrics"]
