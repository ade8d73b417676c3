"""The independent proof checker: derive a proof again from the checkpoint.

It implements the rules of docs/proofs/ a second time, with numpy and the standard library alone,
and shares no code with the backend that wrote the proof.

>>> from kcdsl_certs.recheck import recheck
>>> recheck(b"{}", pathlib.Path("model.safetensors")).reason    # doctest: +SKIP
'document/field'
"""

from kcdsl_certs.recheck.check import Outcome, recheck

__all__ = ["Outcome", "recheck"]
