"""Mechanic for `torch.optim`: `mechanize` tunes an optimizer, `tuner` looks into it."""

from mechanic.torch.attach import mechanize
from mechanic.torch.handle import Tuner, tuner

__all__ = ["Tuner", "mechanize", "tuner"]
