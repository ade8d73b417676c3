"""A user's code for the Python API, as input for type checkers.

mypy and pyright read this file; nothing runs it. A comment `type: ignore` marks a mistake that both
must report.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, assert_type

import kcdsl

contract = kcdsl.load("contract.yaml")
assert_type(contract, kcdsl.Contract)
assert_type(contract.clauses, tuple[kcdsl.Clause, ...])

proved = contract.verify("attn_0", attack=False, jobs=2, sign=["kcdsl.key"])
assert_type(proved, kcdsl.Verification)
assert_type(proved.path, Path)
assert_type(proved.held, bool)
assert_type(proved.rows(), list[dict[str, Any]])

measured = contract.evaluate(["all"], seconds=5.0)
assert_type(measured.report, kcdsl.Report)
assert_type(measured.report.action, str)

result = kcdsl.check(proved.path, key="kcdsl.key.pub", recheck=True)
assert_type(result, kcdsl.CheckResult)
assert_type(result.valid, bool)

contract.verify(blocks="attn_0")  # type: ignore[call-arg]
contract.evaluate(seconds="5")  # type: ignore[arg-type]
kcdsl.check(proved.path, keys="kcdsl.key.pub")  # type: ignore[call-arg]
