"""auto_LiRPA: bounds of the drift in real arithmetic (docs/reference/lirpa.md)."""
