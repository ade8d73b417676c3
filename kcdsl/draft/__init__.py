"""Drafts of contracts: what `kcdsl init` finds in a folder or a file, and what it writes of it.

`folder` reads a model, `quantisation` its quantised storage, `rows` its data; `clauses` chooses
clauses by purpose, `text` writes them, `measure` proposes thresholds from runs.
"""
