"""Names as arguments of functions: blocks and bound variables."""

from __future__ import annotations

import re

from kcdsl.check.names import BLOCK, BLOCK_EXAMPLES, Scope
from kcdsl.check.report import Reporter, suggest
from kcdsl.check.sorts import BLOCK_SORT, STATES, Sequence, described
from kcdsl.diagnostics.codes import BLOCK_NAME, REGION_OF_TOKENS, UNKNOWN_NAME, WRONG_SORT
from kcdsl.diagnostics.model import Label
from kcdsl.syntax import ast


def block_name(expression: ast.Expression, scope: Scope, reporter: Reporter) -> str | None:
    """Return the block that an argument names."""
    if not isinstance(expression, ast.Name):
        found = described(expression, scope)
        reporter.error(WRONG_SORT, f"a {BLOCK_SORT} is needed here, not {found}", expression.span)
        return None
    if not BLOCK.fullmatch(expression.id):
        reporter.error(
            BLOCK_NAME,
            f"there is no block `{expression.id}`",
            expression.span,
            suggest(expression.id, _blocks_like(expression.id), "blocks, with any number"),
        )
        return None
    return expression.id


def _blocks_like(name: str) -> list[str]:
    """Return a block of each kind, with the number that a name ends in."""
    number = re.search(r"(?<![0-9])(?:0|[1-9][0-9]*)$", name)
    return [block.replace("0", number[0] if number else "0") for block in BLOCK_EXAMPLES]


def variable_name(expression: ast.Expression, scope: Scope, reporter: Reporter) -> str | None:
    """Return the bound variable that an argument names."""
    if not isinstance(expression, ast.Name):
        found = described(expression, scope)
        reporter.error(WRONG_SORT, f"a bound variable is needed here, not {found}", expression.span)
        return None
    if expression.id not in scope.variables:
        bound = ", ".join(f"`{name}`" for name in scope.variables)
        reporter.error(
            UNKNOWN_NAME,
            f"`{expression.id}` is not bound by a quantifier",
            expression.span,
            f"bound here: {bound}"
            if bound
            else f"write `forall {expression.id} in points(SLICE): ...`",
        )
        return None
    return expression.id


def check_input(
    block: str | None, variable: ast.Expression, scope: Scope, reporter: Reporter
) -> bool:
    """Report states where the block takes tokens: only blocks inside the model take states."""
    if block != "model" or not isinstance(variable, ast.Name):
        return True
    region = scope.regions.get(variable.id, "points")
    if region == "points":
        return True
    reporter.error(
        REGION_OF_TOKENS,
        f"`model` takes a {Sequence()}, and `{variable.id}` is a {STATES} of a {region}",
        variable.span,
        "quantify over points(SLICE), or speak of a block inside the model",
        (Label(scope.variables[variable.id], "bound here"),),
    )
    return False
