"""Analyses besides the verdict: attribution, differences, plans and experiments."""
