"""Which source makes two kernels drift apart, and in which block.

docs/attribution.md says what is run, what is counted and what a bound excludes.
"""
