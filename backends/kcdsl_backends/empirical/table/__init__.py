"""The evidence table: units of evidence, their Arrow schema, traces and run checkpoints.

`requirements` says what clauses read of it; `evidence` has what one request or timed run gave, and
all of them with their provenance; `rows` the Arrow schema; `trace` a trace as one Parquet file;
`checkpoint` the rows of an unfinished run.
"""
