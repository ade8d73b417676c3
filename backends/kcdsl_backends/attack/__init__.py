"""Concrete admissible runs with a large drift: a lower bound beside every certified upper bound."""
