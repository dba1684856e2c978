"""Mechanic: a learning-rate tuner that wraps an optimizer of PyTorch or optax.

Importing this package imports no framework. Import the adapter of the framework you use::

    from mechanic.torch import mechanize

`mechanic.tuner` holds the mathematics, and is the place to start reading.
"""

from mechanic.options import Options, Preset

__all__ = ["Options", "Preset", "__version__"]

__version__ = "0.1.0"
"""The version of this package, which follows Semantic Versioning."""
