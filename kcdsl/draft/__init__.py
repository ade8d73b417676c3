"""Drafts of contracts, which `kcdsl init` writes for a folder or a file.

`folder` reads a model, `quantisation` its quantised storage, `rows` its data; `clauses` chooses
clauses by purpose, `text` writes them, `measure` proposes thresholds from runs.
"""
