"""Quantizers in boxes and affine forms."""
