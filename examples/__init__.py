"""Examples; a package, so that no other distribution of this name stands before it."""
