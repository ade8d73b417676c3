"""Features of the language server: each answers questions about one snapshot of a document."""
