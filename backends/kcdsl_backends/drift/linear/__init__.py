"""Machinery of linear bounds: the tape of deviations and drifts, and the search for slopes."""
