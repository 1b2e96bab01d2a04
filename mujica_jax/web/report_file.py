"""The run report as one HTML file that needs no server: data, style and JavaScript are inside.

The file holds the same modules as the page, as one script. Its Content-Security-Policy allows this
script and this style alone, by their hashes.
"""

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from importlib import resources
from typing import Any

from mujica_jax.web.report import report_of
from mujica_jax.web.report_data import ReportReader
from mujica_jax.web.run_library import RunLibrary

# Modules of the script. A module stands behind those that it imports.
MODULES = ("dom.js", "charts.js", "report_view.js")
IMPORT = re.compile(r"^import [^;]*;\n", re.MULTILINE)
EXPORT = re.compile(r"^export ", re.MULTILINE)
START = """
drawReport(
  document.getElementById("report"),
  JSON.parse(document.getElementById("data").textContent),
);
"""
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Run report · mujica_jax</title>
<style>{style}</style>
</head>
<body>
<main class="page">
<h1>Run report</h1>
<div id="report"></div>
<noscript>This page needs JavaScript.</noscript>
</main>
<script type="application/json" id="data">{data}</script>
<script type="module">{script}</script>
</body>
</html>
"""


def report_file(directories: Sequence[str]) -> str:
    """Return the report of these runs as the text of an HTML file.

    Raises UserError if a directory holds no run.
    """
    library = RunLibrary(directories)
    content = report_of([ReportReader(run) for run in library.runs.values()])
    style = _static_text("style.css")
    script = "".join(_without_imports(_static_text(name)) for name in MODULES) + START
    policy = (
        f"default-src 'none'; script-src {_hash_of(script)}; style-src {_hash_of(style)}; "
        "base-uri 'none'; form-action 'none'"
    )
    return PAGE.format(policy=policy, style=style, data=json_in_html(content), script=script)


def json_in_html(value: Any) -> str:
    """Return JSON that can stand inside a script element.

    Each "<" is written as an escape, so no text in the value can end the element.
    """
    text = json.dumps(value, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _static_text(name: str) -> str:
    """Return the text of a file of the page."""
    return (resources.files("mujica_jax.web") / "static" / name).read_text(encoding="utf-8")


def _without_imports(module: str) -> str:
    """Return a module without its imports and exports, so that it can be part of one script."""
    return EXPORT.sub("", IMPORT.sub("", module))


def _hash_of(text: str) -> str:
    """Return the source expression of a Content-Security-Policy for this script or style."""
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"
