"""Certificates in OCI registries."""

from kcdsl.release.oci.certificates import Pulled, attach, pull
from kcdsl.release.oci.repository import Repository

__all__ = ["Pulled", "Repository", "attach", "pull"]
