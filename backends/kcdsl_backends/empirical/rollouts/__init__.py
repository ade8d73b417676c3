"""Rollouts: tokens that an inference kernel chose, with the log-probabilities of both sides."""
