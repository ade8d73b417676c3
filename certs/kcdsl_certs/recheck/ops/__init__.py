"""What the checker knows of every operation: its rule in each domain."""
