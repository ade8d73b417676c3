"""The functions behind the commands, for programs and notebooks (docs/reference/python.md)."""
