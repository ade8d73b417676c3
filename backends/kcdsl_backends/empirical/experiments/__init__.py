"""Experiments of one contract: `single` changes one thing at a time (E1), `grid` sweeps devices,
lengths, batches and concurrent streams (E2). `cells` remembers what was measured."""

from kcdsl_backends.empirical.experiments.running import run_experiment

__all__ = ["run_experiment"]
