"""Goals with known answers and random goals for the test of every drift backend."""
