"""Make the README fit for a package index, which cannot follow links into a repository.

With `repository` in pyproject.toml (`[tool.hatch.metadata.hooks.custom]`) the links lead there, to
the tag of this version. Without it a link becomes its text and the path in the source, and a
picture its caption. In the repository itself the README keeps its relative links.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?P<place>[^)\s]+)\)")


def portable(readme: str, repository: str, version: str) -> str:
    """The README with every relative link absolute, or without it if nothing is known to lead to.

    Args:
        readme: Markdown.
        repository: Address of the repository, or "".
        version: Of the package.
    """

    def replaced(link: re.Match[str]) -> str:
        picture, text, place = link.group("picture", "text", "place")
        if "://" in place:
            return link[0]
        if repository:
            kind = "raw" if picture else "blob"
            return f"{picture}[{text}]({repository.rstrip('/')}/{kind}/v{version}/{place})"
        if picture:
            return f"*{text}*"
        path = place.partition("#")[0]
        return text if text == path else f"{text} (`{path}`)"

    return LINK.sub(replaced, readme)


class ReadmeHook(MetadataHookInterface):
    """Called by hatchling for the metadata of a wheel and of a source distribution."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the readme."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = portable(text, str(self.config.get("repository", "")), str(metadata["version"]))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
