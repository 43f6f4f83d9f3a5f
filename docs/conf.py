"""How `make docs` turns this folder and the docstrings into a site: Sphinx, MyST for Markdown, Furo for the looks.

Sphinx because the API reference comes from the docstrings, its search works offline, and the libraries next to this one
(curvlinops, blackjax) are documented with it. MathJax, which draws the equations, is copied into the site: no request
leaves a page.
"""

from __future__ import annotations

import re
from typing import Any

from sphinx.application import Sphinx

import wideflat

project = "wideflat"
author = "The wideflat authors"
version = release = wideflat.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx.ext.mathjax",
    "sphinx-mathjax-offline",
]
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3
exclude_patterns = ["_build", "*.ipynb"]
suppress_warnings = ["myst.xref_missing"]  # links to files of the repository outside of this folder

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_google_docstring = True

html_theme = "furo"
html_show_copyright = False
html_show_search_summary = False  # it would be fetched, which browsers refuse to pages that are opened as files
html_title = f"wideflat {version}"
html_show_sphinx = False
html_copy_source = False


def _bars(app: Sphinx, what: str, name: str, found: Any, options: Any, lines: list[str]) -> None:
    """Norms such as |w| in docstrings are no substitutions of reStructuredText; literal blocks stay as they are."""
    literal: int | None = None
    for number, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        if literal is not None and line.strip() and indent <= literal:
            literal = None
        if literal is None:
            parts = re.split(r"(``.*?``)", line)
            lines[number] = "".join(part if part.startswith("``") else part.replace("|", r"\|") for part in parts)
            if line.rstrip().endswith("::") or line.lstrip().startswith((".. code-block", ">>>")):
                literal = indent


def setup(app: Sphinx) -> None:
    """Tell Sphinx how norms are written."""
    app.connect("autodoc-process-docstring", _bars, priority=900)
