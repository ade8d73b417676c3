"""The content of an open document: its text, positions, names and results."""
