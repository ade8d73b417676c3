"""Checks of a signed statement, step by step, against what is about to be deployed."""
