"""Builds HTML, and escapes every text that is not HTML from here."""

from html import escape


class Markup(str):
    """A string that is HTML, and must not be escaped again."""

    __slots__ = ()


def tag(name: str, *children: str | None, **attributes: str | None) -> Markup:
    """An HTML element. Children and attributes are escaped, and `None` is left out. The attribute
    `class` is written `class_`.

    >>> tag("td", "a < b", class_="low")
    '<td class="low">a &lt; b</td>'
    """
    pairs = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{pairs}>{join(*children)}</{name}>")


def join(*parts: str | None) -> Markup:
    """Join texts to HTML, and escape those that are not HTML."""
    return Markup(
        "".join(part if isinstance(part, Markup) else escape(part) for part in parts if part)
    )
