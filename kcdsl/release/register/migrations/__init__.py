"""Alembic migrations of the tables of a register, run on a given connection."""
