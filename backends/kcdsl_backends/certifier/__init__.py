"""The `interval` backend: clauses about every input of a region, decided with a proof.

cases → workshop (a block under two numerics) → bounding (the domains, cheapest first) → attacking →
backend (verdicts) and proof (what the independent checker re-derives). The backend object is
`kcdsl_backends.certifier.backend:BACKEND`.
"""
