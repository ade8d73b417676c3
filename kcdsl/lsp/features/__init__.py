"""Features of the language server, as functions of one snapshot of a document."""
