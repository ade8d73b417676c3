"""What each operation of a block graph makes of deviation and drift, one module per group."""
