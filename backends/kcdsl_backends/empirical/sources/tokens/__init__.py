"""Token tables: one row per token, many more of them than fit into memory."""
