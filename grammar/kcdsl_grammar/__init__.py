"""The language as data: the expression grammar and the JSON schemas."""

FILES = ("expression.lark", "contract.schema.json", "ir.schema.json", "training.schema.json")
"""Every file of the package that describes the language."""


def text(name: str) -> str:
    """Return the content of one of `FILES`; raises FileNotFoundError for any other name."""
    if name not in FILES:
        raise FileNotFoundError(f"kcdsl_grammar has no {name}")
    from importlib.resources import files

    return files(__name__).joinpath(name).read_text(encoding="utf-8")
