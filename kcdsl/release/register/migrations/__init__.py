"""Migrations of the tables of a register, run by alembic on a connection that is given."""
