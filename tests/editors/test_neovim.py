"""The language server in Neovim, run without a screen."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.programs

SCRIPT = """
local file, server, out = vim.env.CONTRACT, vim.env.SERVER, vim.env.RESULT
local result = {}
vim.cmd("edit " .. vim.fn.fnameescape(file))
local buffer = vim.api.nvim_get_current_buf()
local client = vim.lsp.start_client({
  name = "kcdsl",
  cmd = { server, "lsp" },
  root_dir = vim.fn.fnamemodify(file, ":h"),
})
vim.lsp.buf_attach_client(buffer, client)

local function wait(what, condition)
  if not vim.wait(20000, condition, 20) then
    result.timeout = what
    vim.fn.writefile({ vim.fn.json_encode(result) }, out)
    vim.cmd("cquit 1")
  end
end

local function diagnostics()
  local found = {}
  for _, item in ipairs(vim.diagnostic.get(buffer)) do
    table.insert(found, {
      code = item.code,
      line = item.lnum,
      from = item.col,
      to = item.end_col,
      severity = item.severity,
    })
  end
  return found
end

wait("diagnostics", function() return #vim.diagnostic.get(buffer) > 0 end)
result.diagnostics = diagnostics()

local function ask(method, params)
  local answers = vim.lsp.buf_request_sync(buffer, method, params, 20000)
  for _, answer in pairs(answers or {}) do return answer.result end
end

local here = { uri = vim.uri_from_bufnr(buffer) }
local wrong = result.diagnostics[1]
result.hover = ask("textDocument/hover", {
  textDocument = here,
  position = { line = wrong.line, character = vim.env.HOVER + 0 },
})
result.symbols = ask("textDocument/documentSymbol", { textDocument = here })

local line = vim.api.nvim_buf_get_lines(buffer, wrong.line, wrong.line + 1, true)[1]
vim.api.nvim_buf_set_lines(buffer, wrong.line, wrong.line + 1, true, { (line:gsub("klx", "kl")) })
wait("the end of the diagnostics", function() return #vim.diagnostic.get(buffer) == 0 end)
result.cleared = true
vim.fn.writefile({ vim.fn.json_encode(result) }, out)
vim.cmd("qall!")
"""
CONTRACT = """kcdsl: 1
contract: c
version: 1.0.0
model: {checkpoint: m.safetensors, architecture: llama}
kernels: {train: {run: torch.eager}, infer: {run: torch.sdpa}}
data: d.jsonl
slices: {all: {}, s: {where: 'a == "é🚀"'}}
clauses:
  N-KL: {require: "p99(klx) <= 0.02", slices: [all, s], level: L2}
"""


def test_diagnostics_hover_and_symbols_follow_an_edit(tmp_path: Path) -> None:
    contract, script, out = tmp_path / "c.kc.yaml", tmp_path / "s.lua", tmp_path / "out.json"
    contract.write_text(CONTRACT, encoding="utf-8")
    script.write_text(SCRIPT, encoding="utf-8")
    for name in ("m.safetensors", "d.jsonl"):
        (tmp_path / name).touch()
    line = CONTRACT.splitlines()[8]
    environment = {
        "CONTRACT": str(contract),
        "SERVER": str(Path(sys.executable).with_name("kcdsl")),
        "RESULT": str(out),
        "HOVER": str(line.index("p99") + 1),
        "HOME": str(tmp_path),
        "PATH": "/usr/bin:/bin",
    }
    subprocess.run(
        ["nvim", "--headless", "-u", "NONE", "-n", "-c", f"luafile {script}"],
        env=environment,
        cwd=tmp_path,
        timeout=90,
        check=False,
        capture_output=True,
    )
    result: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    assert "timeout" not in result, result
    at = line.index("klx")
    assert [(d["code"], d["line"], d["from"], d["to"]) for d in result["diagnostics"]] == [
        ("KC203", 8, at, at + 3)
    ]
    assert "p99" in json.dumps(result["hover"])
    assert "N-KL" in json.dumps(result["symbols"])
    assert result["cleared"] is True
