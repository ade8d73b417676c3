"""`kcdsl why`: which of three causes made a triple fail in production."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from kcdsl.cli.commands.release.promotion import digest
from kcdsl.cli.common import argument, values
from kcdsl.cli.common.execution import CodeOptions, Device, device_option
from kcdsl.cli.common.options import OutputFormat, format_option, register_option, register_place
from kcdsl.cli.common.output import print_json, progress_bars
from kcdsl.exits import Exit


def _named_checkpoint(text: str) -> tuple[str, Path]:
    """Return the digest and the path of DIGEST=PATH."""
    stated, found, path = text.partition("=")
    if not found or not path:
        raise argparse.ArgumentTypeError(f"must be DIGEST=PATH, not {text[:80]!r}")
    return digest(stated), Path(path)


@dataclass(frozen=True, kw_only=True)
class WhyCommand(CodeOptions):
    """Find why a triple failed: loose contract, regressed kernels, or the model update."""

    trace: str = argument("TRACE", "trace.parquet, or report.json, of the triple that failed")
    register: str | None = register_option("with the triple and its predecessors")
    evidence: tuple[str, ...] = values(
        "TRACE", "a run of earlier weights or kernels on the same requests; repeatable"
    )
    contract: tuple[str, ...] = values(
        "CONTRACT", "run its kernels here if a run is missing; repeatable"
    )
    checkpoint: tuple[tuple[str, Path], ...] = values(
        "DIGEST=PATH", "weights for such runs, by their digest; repeatable", read=_named_checkpoint
    )
    device: Device = device_option()
    format: OutputFormat = format_option()

    def run(self) -> Exit:
        """Explain: 0 none of the three causes, 1 at least one is shown, 3 none is shown and one is
        not decided."""
        from kcdsl.api.causes import WhySettings, explain

        found = explain(
            self.settings(
                WhySettings,
                trace=Path(self.trace),
                register=register_place(self.register),
                checkpoint=dict(self.checkpoint),
                progress=progress_bars,
            )
        )
        if self.format is OutputFormat.JSON:
            print_json(found.to_json())
        else:
            from kcdsl.verdict.text.causes import print_causes

            print_causes(found, sys.stdout)
        return found.exit
