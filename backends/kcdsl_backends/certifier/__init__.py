"""The `interval` backend: clauses about every input of a region, decided with a proof.

cases → workshop (a block under two numerics) → bounding (the domains, cheapest first) → attacking:
that is the work (work.py), and cache.py remembers it. engine.py spreads it, over processes.py or
distributed.py; deciding.py gathers verdicts.py and proof.py (what the independent checker
re-derives). The backend object is `kcdsl_backends.certifier.backend:BACKEND`.
"""
