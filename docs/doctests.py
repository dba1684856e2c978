"""An extension of griffe: an example in a docstring is shown as code, in any place of it."""

import re
from typing import Any

from griffe import Extension, Object

EXAMPLE = re.compile(r"^>>> .*?(?=\n\n(?!>>>)|\n*\Z)", re.MULTILINE | re.DOTALL)


class Doctests(Extension):
    """Puts a fence around the lines that Markdown would take for quotations."""

    def on_instance(self, *, obj: Object, **_: Any) -> None:
        """Change the docstring of an object when it was read."""
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(r"```python\n\g<0>\n```", obj.docstring.value)
