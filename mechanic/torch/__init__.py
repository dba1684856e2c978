"""Mechanic for `torch.optim`: `mechanize` tunes an optimizer, `tuner` looks into it."""

try:
    from mechanic.torch.attach import mechanize
    from mechanic.torch.handle import Tuner, tuner
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError(
        "mechanic.torch needs torch: pip install torch", name="torch"
    ) from None

__all__ = ["Tuner", "mechanize", "tuner"]
