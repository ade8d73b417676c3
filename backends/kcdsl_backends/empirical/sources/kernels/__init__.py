"""Kernels that run on this machine: loading, one run of a request, times."""
