"""The entries of every operation (docs/affine-forms.md, sections 3 to 5)."""
