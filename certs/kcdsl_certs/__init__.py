"""Certificates: statement, envelope, keys and strict verification.

The format is specified in `certs/README.md`. This package needs the standard library, cryptography
and rfc8785 only, so that a release gate can check a certificate without a tensor library.
"""
