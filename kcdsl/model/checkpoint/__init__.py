"""Checkpoints: their files and headers (without torch), and their tensors."""
