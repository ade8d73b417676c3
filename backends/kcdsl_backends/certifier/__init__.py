"""The `interval` backend: clauses about every input of a region, decided with a proof.

statements/: cases.py has the regions of a goal, problems.py and sequences.py a block under two
numerics, proof.py the proof document. bounds.py runs the domains, cheapest first; stages.py and
composition.py bound stage by stage. tasks.py has the tasks of one case, cache.py their cached
results, worker_pool.py their parallel execution. decision.py decides, replay.py runs
counterexamples again. The backend object is `kcdsl_backends.certifier.backend:BACKEND`.
"""
