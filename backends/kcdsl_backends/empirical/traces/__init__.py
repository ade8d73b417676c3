"""Traces: evidence as one Parquet file, from which the same report is concluded."""
