"""What an open document says: its text, positions, names and results."""
