"""The file of kernel fingerprints: written where kernels ran, read where a release is checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kcdsl.diagnostics import Refusal, refuse
from kcdsl.diagnostics.codes import FILE_MISSING, KERNELS_FILE
from kcdsl.release.triple import Fingerprints
from kcdsl.source.files import open_regular
from kcdsl_certs.rejected import Rejected
from kcdsl_certs.strict import strict_load

KERNELS_SCHEMA = "kcdsl.kernels/1"
_LARGEST = 2**20


def kernels_document(fingerprints: Fingerprints) -> bytes:
    """Return the document `kcdsl.kernels/1` (kernels.schema.json) of both kernels."""
    document = {
        "schema": KERNELS_SCHEMA,
        "train": dict(fingerprints["train"]),
        "infer": dict(fingerprints["infer"]),
    }
    return (json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def read_kernels(path: Path) -> Fingerprints:
    """Read the fingerprints of `train` and `infer`; raises Refusal where that fails."""
    try:
        with open_regular(path) as stream:
            value: Any = strict_load(stream.read(_LARGEST + 1), _LARGEST)
    except OSError as error:
        raise refuse(FILE_MISSING, f"{path} cannot be read: {error.strerror}") from error
    except Rejected as error:
        raise _refused(path, f": {error.detail} ({error.reason})") from error
    match value:
        case {"schema": schema, "train": dict(train), "infer": dict(infer), **rest}:
            if schema == KERNELS_SCHEMA and not rest:
                return {"train": train, "infer": infer}
        case _:
            pass
    raise _refused(path, "")


def _refused(path: Path, why: str) -> Refusal:
    return refuse(
        KERNELS_FILE,
        f"{path} is no document of the schema {KERNELS_SCHEMA}{why}",
        help="`kcdsl evaluate` writes one, kernels.json; it has the objects `train` and `infer`",
    )
