"""The `interval` backend: clauses about every input of a region, decided with a proof.

cases.py: the regions of a goal. problems.py, sequences.py: a block under two numerics. bounds.py:
the domains, cheapest first; stages.py, composition.py: stage by stage. tasks.py: the
work on one case, which cache.py remembers and workers.py spreads. decision.py: verdicts and proofs
(proof.py: what the independent checker re-derives). replay.py: counterexamples, run again. The
backend object is `kcdsl_backends.certifier.backend:BACKEND`.
"""
