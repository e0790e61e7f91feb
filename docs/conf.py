"""Sphinx's settings for the documentation (`make docs`)."""

import os
import re
from pathlib import Path

from sphinx.application import Sphinx

import proxyccl

ROOT = Path(__file__).parent.parent

project = "ProxyCCL"
author = "the ProxyCCL authors"
copyright = "the ProxyCCL authors"
version = release = proxyccl.__version__
html_title = f"ProxyCCL {release}"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.intersphinx",
    "breathe",
    "sphinx_copybutton",
    "sphinxarg.ext",
]
templates_path: list[str] = []
exclude_patterns = ["reference/*.rendered.md"]  # these pages are for readers without the site
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["proxyccl.css"]
html_theme_options = {"source_repository": "", "footer_icons": []}
pygments_style = "friendly"
pygments_dark_style = "github-dark"

myst_enable_extensions = ["colon_fence", "deflist", "attrs_inline", "fieldlist"]
myst_heading_anchors = 4
# Anchors are made as GitHub makes them, so that links also work on GitHub.
myst_url_schemes = {"http": None, "https": None, "mailto": None}

# torch is not installed where the site is built, but documented modules import it.
autodoc_mock_imports = ["torch"]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_use_unqualified_type_names = True
default_role = "py:obj"  # links a name in backticks to its entry on the site
suppress_warnings = ["ref.python"]  # a name that several classes share, such as `rank`, needs no link
maximum_signature_line_length = 88

breathe_projects = {"device": str(ROOT / "build/docs/doxygen/xml")}
breathe_default_project = "device"
cpp_id_attributes = ["PROXYCCL_DEVICE", "__device__"]

linkcheck_anchors = False

# -- links in files that the site includes ---

SOURCE = Path(__file__).parent
PAGE_OF = {"README.md": "index.md"} | {
    (page.parent / name).resolve().relative_to(ROOT).as_posix(): page.relative_to(SOURCE).as_posix()
    for page in sorted(SOURCE.rglob("*.md"))
    for name in re.findall(r"^```\{include\} (\S+)", page.read_text(), re.MULTILINE)
}
"""The page of the site that includes a file of the tree."""

LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^()\s:]+)\)")


def _site_links(text: str, written_in: Path, page: Path) -> str:
    """Returns a file's text for a page of the site: links to files that are not on the site become the files' names."""

    def replaced(found: re.Match[str]) -> str:
        mark, label, (target, _, anchor) = found[1], found[2], found[3].partition("#")
        if not target:
            return found[0]
        file = (written_in.parent / target.replace(".rendered.md", ".md")).resolve()
        name = file.relative_to(ROOT).as_posix() if file.is_relative_to(ROOT) else ""
        on_site = PAGE_OF.get(name) or (name.removeprefix("docs/") if name.startswith("docs/") else "")
        if mark:
            return f"![{label}]({os.path.relpath(file, page.parent)})"
        if on_site:
            return f"[{label}](/{on_site}{'#' + anchor if anchor else ''})"
        return f"{label} (`{name}`)" if label.strip("`") != name else f"`{name}`"

    return LINK.sub(replaced, text)


def _included(app: Sphinx, path: Path, parent: str, content: list[str]) -> None:
    file = Path(app.srcdir, path).resolve()
    content[0] = _site_links(content[0], file, Path(app.srcdir, parent).resolve())


def _read(app: Sphinx, name: str, content: list[str]) -> None:
    page = Path(app.srcdir, name + ".md").resolve()
    content[0] = _site_links(content[0], page, page)


def setup(app: Sphinx) -> None:
    """Registers this file's hooks; Sphinx calls this function when it starts."""
    app.connect("include-read", _included)
    app.connect("source-read", _read)
