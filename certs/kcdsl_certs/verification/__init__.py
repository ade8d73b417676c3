"""Checks of a signed statement, step by step, against the triple to be deployed."""
