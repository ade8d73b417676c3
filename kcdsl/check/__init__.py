"""The checker: from the text of a contract to a typed program.

`compile` runs every pass, over the `sections` of a document and the `expressions` in them;
`incremental` repeats them after an edit, `fixing` applies fixes, `suppressions` accepts findings.
"""
