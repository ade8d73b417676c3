"""Softmax, its product with the values, rotations and caches."""
