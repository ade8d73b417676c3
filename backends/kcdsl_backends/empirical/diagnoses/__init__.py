"""Diagnoses distinguish a drift of numerics from a mistake in the set-up.

Each has a name and an outcome (`DIAGNOSES`). Blocking ones make every clause about the model
`InvalidEvidence`.
"""
