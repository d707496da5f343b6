"""Hooks of the documentation's site: the list of decisions, and links to files outside `docs/`."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

OUTSIDE = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)#]+)(?:#[^)]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page that lists the decisions by their titles."""
    directory = Path(config.docs_dir) / "decisions"
    lines = ["# Decisions", "", "Each page names a choice, the reasons for it, and its cost.", ""]
    for path in sorted(directory.glob("[0-9]*.md")):
        title = path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
        lines.append(f"- {path.name[:4]}: [{title}]({path.name})")
    files.append(File.generated(config, "decisions/index.md", content="\n".join(lines) + "\n"))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Show the path of a file of the repository instead of a link to it, because the site does not hold the file."""
    del files
    here = (Path(config.docs_dir) / page.file.src_uri).parent

    def named(match: re.Match[str]) -> str:
        target = (here / match[2]).resolve()
        root = Path(config.docs_dir).resolve().parent
        return f"{match[1]} (`{target.relative_to(root)}` in the repository)"

    return OUTSIDE.sub(named, markdown)
