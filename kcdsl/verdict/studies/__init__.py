"""Answers to questions beside the verdict: attribution, differences, plans and experiments."""
