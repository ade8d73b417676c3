"""The evidence table: units of evidence, their Arrow schema, traces and run checkpoints.

`requirements` derives the metrics, slices and rates of clauses; `evidence` has the results of
single requests and timed runs, and the table of all with their provenance; `rows` the Arrow schema;
`trace` a trace as one Parquet file; `checkpoint` the rows of an unfinished run.
"""
