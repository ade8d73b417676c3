"""Aggregating token tables: one row per token, many more of them than fit into memory.

`tables` reads what Parquet files hold, `sql` writes the queries, `engine` runs them in bounded
memory, `tokens` counts tokens by slice, `requests` reduces each request to what statistics need of
it, `shards` does both on parts of the files and merges, `deciding` decides clauses.
"""
