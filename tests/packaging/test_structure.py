"""The structure of the product satisfies the limits of `make bench-house`, except for its size."""

from __future__ import annotations

import ast
from pathlib import Path

from bench.house import LIMITS, structure
from bench.house_code import read
from kcdsl.model.numerics.formats import CODE_FORMATS, LAYOUTS


def test_structure_is_within_its_limits(repository: Path) -> None:
    """Limits on folders, cycles, import depth, names, and code that only tests use."""
    found = structure(read(repository))
    limits = {name: limit for name, limit in LIMITS.items() if name not in ("files", "lines")}
    limits |= {"definitions that nothing uses": 0, "definitions that only tests use": 0}
    beyond = [name for name, most in limits.items() if found.values[name] > most]
    assert beyond == [], "\n".join(found.listed)


RULES = (
    *("backends/kcdsl_backends/" + name for name in ("attack", "certifier", "drift")),
    *(
        "certs/kcdsl_certs/recheck/" + name
        for name in ("affine", "interval", "linear_bounds", "ops")
    ),
)
READERS = {"decoding.py", "stated.py", "torchao.py"}
"""Modules that read the configurations of quantised checkpoints."""


def test_rules_ask_formats_and_layouts_instead_of_comparing_names(repository: Path) -> None:
    """A rule reads what it depends on from the definition of a format of codes or of a layout."""
    names, found = {*CODE_FORMATS, *LAYOUTS, "none", "static"}, []
    for path in (path for folder in RULES for path in (repository / folder).rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        compared = [node for node in ast.walk(tree) if isinstance(node, ast.Compare)]
        texts = {
            part.value
            for node in compared
            for part in ast.walk(node)
            if isinstance(part, ast.Constant) and isinstance(part.value, str)
        }
        if texts & names and path.name not in READERS:
            found.append(f"{path}: {texts & names}")
    assert found == []
