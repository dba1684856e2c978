"""A hook of mkdocs: the pages and files outside of docs/ that the docs link to join the site.

A page keeps its links as they work in the repository, from docs/ to ../README.md and the like. In
the site everything lies below one root: docs/run.md is run.md, and other files keep their paths.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
DOCS = "docs/"
FIRST = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
LINK = re.compile(r"(\[[^\]]*\]\()([^)\s#]+)")
NOTEBOOK = re.compile(r"\]\([^)\s]+\.ipynb\)")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Add what can be reached from the pages."""
    known = {DOCS + file.src_uri for file in files}
    waiting = [path for path in known if path.endswith(".md")] + list(FIRST)
    while waiting:
        path = waiting.pop()
        if path not in known:
            known.add(path)
            files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
        if path.endswith(".md"):
            waiting += [target for target in targets(path) if target not in known]
    return files


def targets(page: str) -> list[str]:
    """The files of the repository that a page links to."""
    text = FENCE.sub("", (ROOT / page).read_text("utf-8"))
    found = [resolve(page, link) for _, link in LINK.findall(text) if "://" not in link]
    return [path for path in found if (ROOT / path).is_file()]


def resolve(page: str, link: str) -> str:
    """The path in the repository that a link on a page leads to; of a folder, its page."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
    return f"{path}/README.md" if (ROOT / path).is_dir() else path


def on_page_markdown(text: str, page: Any, **_: Any) -> str:
    """Rewrite the links of a page, and indent lists as Python-Markdown wants them."""
    uri = page.file.src_uri
    source = uri if (ROOT / uri).is_file() and page.file.generated_by else DOCS + uri

    def rewritten(match: re.Match[str]) -> str:
        opening, link = match.groups()
        if "://" in link:
            return match[0]
        target = resolve(source, link).removeprefix(DOCS)
        return opening + posixpath.relpath(target, posixpath.dirname(uri) or ".")

    parts, end = [], 0
    for fence in [*FENCE.finditer(text), None]:
        start = fence.start() if fence else len(text)
        prose = indent_lists(LINK.sub(rewritten, text[end:start]))
        prose = NOTEBOOK.sub(r"\g<0> (to open in Jupyter)", prose)  # a browser shows its JSON
        parts += [prose, fence[0] if fence else ""]
        end = fence.end() if fence else end
    return "".join(parts)


def indent_lists(text: str) -> str:
    """What belongs to an item of a list begins after two spaces in the repository, as on GitHub,
    and after four in the site."""
    lines, in_list = [], False
    for line in text.split("\n"):
        if line and not line.startswith(" "):
            in_list = line.startswith("- ")
        lines.append("  " + line if in_list and line.startswith(" ") else line)
    return "\n".join(lines)
