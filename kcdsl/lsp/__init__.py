"""The language server. Features are pure functions of a `Snapshot`; `server` registers them.

Internal offsets count code points (`Span`); `positions` converts them to the units of a client.
"""
