"""The language server. Features are pure functions over a `Snapshot`; `server` is their wiring.

Inside, places are code points (`Span`); `positions` and `wire` turn them into what a client counts.
"""
