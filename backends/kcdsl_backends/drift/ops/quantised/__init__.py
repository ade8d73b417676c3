"""Quantisers in boxes and affine forms: of inputs of linears, and of tensors."""
