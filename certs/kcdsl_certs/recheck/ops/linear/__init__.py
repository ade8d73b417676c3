"""Linears and products of matrices."""
