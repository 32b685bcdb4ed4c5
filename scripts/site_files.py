"""A hook of mkdocs (mkdocs.yml): files of the repository that pages of docs/ link to become files
of the site, below `repository/`."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = re.compile(r"\]\(\.\./([\w./-]+)")  # of a page that lies in docs/ itself


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
    """The links to them."""
    return markdown if "/" in page.file.src_uri else OUTSIDE.sub(r"](repository/\1", markdown)
