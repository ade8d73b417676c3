"""Attribution of the drift between two kernels to sources and blocks.

docs/attribution.md says what is run, what is counted and what a bound excludes.
"""
