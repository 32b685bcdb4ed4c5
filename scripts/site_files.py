"""A hook of mkdocs (mkdocs.yml). Files of the repository that pages of docs/ link to become files
of the site, below `repository/`; on the page of the Python names, what a docstring says of each
argument becomes a list."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = re.compile(r"\]\(\.\./([\w./-]+)")  # of a page that lies in docs/ itself
ARGUMENTS = re.compile(r"(?:^|(?<=[.;] )|(?<=[.;]\n))([a-z_]+(?:,\s[a-z_]+)*):\s")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds what is linked to. A link to a file that does not exist is left to mkdocs, whose strict
    build fails."""
    pages = [ROOT / "docs" / f.src_uri for f in files.documentation_pages() if "/" not in f.src_uri]
    named = {name for page in pages for name in OUTSIDE.findall(page.read_text(encoding="utf-8"))}
    for name in sorted(named | {"CONTRIBUTING.md"}):
        if (ROOT / name).is_file():
            files.append(File.generated(config, f"repository/{name}",
                                        abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The links to them, and theirs to pages."""
    if page.file.src_uri.startswith("repository/"):
        return markdown.replace("](docs/", "](../")
    return markdown if "/" in page.file.src_uri else OUTSIDE.sub(r"](repository/\1", markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The arguments of docstrings as lists."""
    if page.file.src_uri != "api.md":
        return html
    return re.sub(r"<p>(.*?)</p>", lambda found: _listed(found[1]), html, flags=re.S)


def _listed(text: str) -> str:
    """A paragraph, as a list from the first argument on if it names several."""
    before, *rest = ARGUMENTS.split(text)
    if len(rest) < 4:
        return f"<p>{text}</p>"
    last, after = re.match(r"(.*?)((?<=[.] )Raises .*|(?<=[.]\n)Raises .*|$)", rest[-1],
                           re.S).groups()
    pairs = zip(rest[::2], [*rest[1:-1:2], last], strict=True)
    items = "".join(f"<li><code>{name}</code>: {said.strip()}</li>" for name, said in pairs)
    return "".join(f"<p>{part}</p>" for part in (before,) if part.strip()) + (
        f"<ul>{items}</ul>") + (f"<p>{after}</p>" if after else "")
