"""What each operation makes of deviation and drift (sections 3 and 4)."""
