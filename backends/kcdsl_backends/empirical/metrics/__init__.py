"""The functions of metrics: arrays in, values out; `kcdsl.metrics` defines what each means.

`measures` finds a function by the arrays it reads; `full_logits` gives all metrics of full logits
in one pass; `user` loads and calls the functions that a contract's author declares.
"""
