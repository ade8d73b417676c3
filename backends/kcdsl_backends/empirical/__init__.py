"""The `empirical` backend: runs both kernels on the slices and measures.

The backend object is `kcdsl_backends.empirical.backend:BACKEND`.
"""
