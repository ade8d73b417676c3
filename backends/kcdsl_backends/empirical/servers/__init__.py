"""Kernels behind an OpenAI-compatible server: tokens that it draws, with their probabilities."""
