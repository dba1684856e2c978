"""HTML that is escaped unless it was made here."""

from html import escape


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def tag(name: str, *children: str | None, **attributes: str | None) -> Markup:
    """An element. Children and attributes are escaped; `None` is left out; `_` ends `class_`.

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
    """One after the other, escaped where they are not HTML."""
    return Markup(
        "".join(part if isinstance(part, Markup) else escape(part) for part in parts if part)
    )
