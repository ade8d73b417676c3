"""Aggregating token tables: one row per token, many more of them than fit into memory.

`tables` reads what Parquet files hold, `selecting` and `sql` write the queries, `engine` runs them
in bounded memory, `checks` refuses rows that cannot be told, `tokens` counts tokens by slice,
`requests` reduces each request to what statistics need of it, `meaning` holds that against what its
metric can be, `shards` counts parts of the files and merges, `deciding` decides clauses.
"""
