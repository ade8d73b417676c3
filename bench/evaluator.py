"""Cost and findings of the evaluator: all metrics of full logits in one pass over both kernels'
logits, planted mistakes around the kernels of the tiny language model, and aggregation by slice.

    make bench-evaluator
    python -m bench.evaluator --rows 1e7    # a smaller table of tokens

It writes the table of docs/reference/metrics.md.
"""

from __future__ import annotations

import argparse
import sys

from bench.common import report, show_in
from bench.evaluator_aggregation import ROWS, aggregation_figures
from bench.evaluator_diagnoses import diagnosis_figures
from bench.evaluator_tier_a import tier_a_figures, tier_a_table


def main() -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=float, default=ROWS, help="tokens that are aggregated")
    rows = int(parser.parse_args().rows)
    tier_a = tier_a_figures()
    show_in("reference/metrics.md", "evaluator", tier_a_table(tier_a))
    return report("evaluator", [*tier_a, *diagnosis_figures(), *aggregation_figures(rows)])


if __name__ == "__main__":
    sys.exit(main())
