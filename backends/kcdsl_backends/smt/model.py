"""What the SMT backend takes and gives; the types live with the other verdicts."""

from kcdsl.verdict.outcome import Implied, ImpliedBound, ProvedDrift

__all__ = ["Implied", "ImpliedBound", "ProvedDrift"]
