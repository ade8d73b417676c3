"""The checker: from the text of a contract to a typed program.

`compile` runs every pass, over the `sections` of a document and the `expressions` in them;
`incremental` repeats them after an edit, `fixes` applies fixes, `suppressions` accepts findings.

The package is callable: `kcdsl.check(…)` verifies certificates (`kcdsl.api.certificates`),
whichever of function and package was imported first.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    def __call__(self, *certificates: Any, **options: Any) -> Any:
        from kcdsl.api.certificates import check

        return check(*certificates, **options)


sys.modules[__name__].__class__ = _CallablePackage
