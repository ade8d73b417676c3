"""The rules of the affine domain, one module per family of operations."""
