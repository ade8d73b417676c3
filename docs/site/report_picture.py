"""Draw docs/images/evaluate-minilm.svg: the printed report of an evaluation as a picture.

python -m docs.site.report_picture examples/minilm/out/report.json
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from io import StringIO
from pathlib import Path
from typing import Any

from kcdsl.diagnostics.render.terminal import printable
from kcdsl.verdict.text.console import WIDTH, SanitisingConsole
from kcdsl.verdict.text.report import render

PICTURE = Path(__file__).resolve().parents[1] / "images" / "evaluate-minilm.svg"
_FONT = re.compile(r"@font-face\s*\{.*?\}\s*", re.DOTALL)


def draw(report: Mapping[str, Any]) -> str:
    """Return a report document as an SVG picture that fetches nothing: no font from elsewhere."""
    # with a height too, as rich takes terminals called "dumb" to be 80 columns wide else
    console = SanitisingConsole(
        record=True, width=WIDTH, height=50, file=StringIO(), force_terminal=True
    )
    console.print(render(report))
    picture = console.export_svg(title=f"kcdsl evaluate · {report['contract']['name']}")
    return printable(_FONT.sub("", picture))


if __name__ == "__main__":
    PICTURE.write_text(draw(json.loads(Path(sys.argv[1]).read_text("utf-8"))), encoding="utf-8")
