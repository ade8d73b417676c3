"""The language server in Emacs with eglot, run in batch mode."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.programs

SCRIPT = r"""
(require 'package)
(package-initialize)
(require 'eglot)
(require 'flymake)
(require 'json)
(setq eglot-sync-connect t eglot-autoshutdown t eglot-connect-timeout 30)
(define-derived-mode kernel-contract-mode prog-mode "Contract")
(add-to-list 'eglot-server-programs
             `(kernel-contract-mode . (,(getenv "SERVER") "lsp")))
(defun await (what condition)
  (let ((left 400))
    (while (and (> left 0) (not (funcall condition)))
      (accept-process-output nil 0.05)
      (setq left (1- left)))
    (when (= left 0) (message "TIMEOUT %s" what) (kill-emacs 3))))
(defun found ()
  (mapcar (lambda (d) (list (line-number-at-pos (flymake-diagnostic-beg d))
                            (buffer-substring-no-properties (flymake-diagnostic-beg d)
                                                            (flymake-diagnostic-end d))
                            (flymake-diagnostic-text d)))
          (flymake-diagnostics)))
(find-file (getenv "CONTRACT"))
(kernel-contract-mode)
(call-interactively #'eglot)
(flymake-mode 1)
(await "diagnostics" (lambda () (flymake-start) (flymake-diagnostics)))
(let ((before (found)))
  (goto-char (point-min))
  (search-forward "klx")
  (replace-match "kl")
  (eglot--signal-textDocument/didChange)
  (await "the end of the diagnostics" (lambda () (flymake-start) (null (flymake-diagnostics))))
  (with-temp-file (getenv "RESULT")
    (insert (json-encode (vconcat (mapcar #'vconcat before))))))
(set-buffer-modified-p nil)
(kill-emacs 0)
"""
CONTRACT = """kcdsl: 1
contract: c
version: 1.0.0
model: {checkpoint: m.safetensors, architecture: llama}
kernels: {train: {run: torch.eager}, infer: {run: torch.sdpa}}
data: d.jsonl
slices: {all: {}, s: {where: 'a == "é🚀"'}}
clauses:
  N-KL: {require: 'max(tv) <= 5% and p99(klx) <= 0.02', slices: [all, s], level: L2}
"""


def test_flymake_shows_findings_until_an_edit_fixes_them(tmp_path: Path) -> None:
    contract, script, out = tmp_path / "c.kc.yaml", tmp_path / "s.el", tmp_path / "out.json"
    contract.write_text(CONTRACT, encoding="utf-8")
    script.write_text(SCRIPT, encoding="utf-8")
    for name in ("m.safetensors", "d.jsonl"):
        (tmp_path / name).touch()
    environment = {
        "CONTRACT": str(contract),
        "SERVER": str(Path(sys.executable).with_name("kcdsl")),
        "RESULT": str(out),
        "HOME": str(tmp_path),
        "PATH": "/usr/bin:/bin",
        "LANG": "C.UTF-8",
    }
    done = subprocess.run(
        ["emacs", "--batch", "-l", str(script)],
        env=environment,
        cwd=tmp_path,
        timeout=120,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found: list[list[Any]] = json.loads(out.read_text(encoding="utf-8"))
    assert [(line, text) for line, text, _ in found] == [(9, "klx")]
    assert "there is no metric" in found[0][2]
