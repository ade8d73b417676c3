"""Collection: load what a contract names, and fill the evidence table from its sources."""
