"""What the evaluator costs, and what it finds: every metric of full logits in one pass over both
kernels' logits, and the mistakes planted around the kernels of the tiny language model.

    make bench-evaluator

The table of docs/metrics.md is written by it.
"""

from __future__ import annotations

import sys

from bench.common import report, show_in
from bench.evaluator_diagnoses import diagnosis_figures
from bench.evaluator_tier_a import tier_a_figures, tier_a_table


def main() -> int:
    """Measure and report."""
    tier_a = tier_a_figures()
    show_in("metrics.md", "evaluator", tier_a_table(tier_a))
    return report("evaluator", [*tier_a, *diagnosis_figures()])


if __name__ == "__main__":
    sys.exit(main())
