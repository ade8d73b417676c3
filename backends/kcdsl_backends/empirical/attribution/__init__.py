"""Attribution of the drift between two kernels to sources and blocks.

docs/reference/attribution.md says what is run, what is counted and what a bound excludes.
"""
