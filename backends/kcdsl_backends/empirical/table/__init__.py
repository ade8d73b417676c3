"""The evidence table: units of evidence, their Arrow schema, traces and run checkpoints.

`units` has what one request or timed run gave, `evidence` all of them with their provenance, `rows`
the Arrow schema, `trace` and `header` a trace as one Parquet file, `checkpoint` the rows of a run
that has not ended.
"""
