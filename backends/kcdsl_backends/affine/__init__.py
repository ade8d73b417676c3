"""Affine bounds of rounding errors around a reference run (docs/affine-forms.md)."""
