"""Certificates: statement, envelope, keys and strict verification.

The format is specified in `certs/README.md`. This package needs the standard library, cryptography
and rfc8785, and numpy where proofs are derived again, so that a release gate can check a
certificate without torch.
"""
