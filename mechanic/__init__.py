"""Mechanic: a learning-rate tuner that wraps any optimizer.

Importing this package imports no framework. Take the adapter you train with::

    from mechanic.torch import mechanize

`mechanic.tuner` is the mathematics, and the place to start reading.
"""

from mechanic.options import Options, Preset

__all__ = ["Options", "Preset", "__version__"]

__version__ = "0.1.0"
