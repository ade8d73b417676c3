"""Arguments that several commands take, each declared once."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kcdsl.cli.common.declare import argument, choice, switch, value, values
from kcdsl.cli.common.readers import count, seed
from kcdsl.diagnostics import refuse
from kcdsl.diagnostics.codes import NO_DEVICE
from kcdsl.route.catalogue import ENGINES

if TYPE_CHECKING:
    from kcdsl.release.triple import Fingerprints
    from kcdsl.route.catalogue import Execution

KERNELS = (
    "kernel fingerprints, the kernels.json of `kcdsl evaluate`, instead of those of this machine"
)


class Device(StrEnum):
    """Where kernels run."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class Engine(StrEnum):
    """Where workers run."""

    PROCESSES = ENGINES[0]
    RAY = ENGINES[1]


def contract_argument() -> Any:
    """Declare the contract that a command is about."""
    return argument("CONTRACT", "default: the one here", "?")


def code_words() -> tuple[str, ...]:
    """Return what stands for codes of diagnostics: each of them, and each family of them."""
    from kcdsl.diagnostics.codes import FAMILIES, all_codes

    return (*FAMILIES, *(code.id for code in all_codes()))


def json_option(help: str = "print one JSON object") -> Any:
    """Declare `--json`."""
    return switch(help)


def slice_option() -> Any:
    """Declare `--slice`."""
    return values("NAME", "only this slice", name="slice")


def seed_option(what: str = "sampling and resampling") -> Any:
    """Declare `--seed`."""
    return value("N", f"of {what}", 0, read=seed)


def output_option(metavar: str, help: str, default: str | None = None) -> Any:
    """Declare `-o` for a FILE or a DIR."""
    return value(metavar, help, default, short="-o")


def device_option(default: Device = Device.AUTO) -> Any:
    """Declare `--device`."""
    return choice(Device, "where kernels run; auto takes CUDA where there is one", default)


def choose_device(wanted: Device) -> str:
    """Return "cuda" or "cpu": `auto` takes CUDA where there is one. Raises Refusal without CUDA."""
    visible = "CUDA_VISIBLE_DEVICES"
    if wanted == Device.CUDA and os.environ.get(visible, "all") in ("", "-1"):
        raise refuse(
            NO_DEVICE, f"{visible} hides every CUDA device", help="unset it, or use --device cpu"
        )
    import torch

    available = torch.cuda.is_available()
    if wanted == Device.CUDA and not available:
        raise refuse(NO_DEVICE, "torch sees no CUDA device", help="use --device cpu")
    return "cuda" if available and wanted != Device.CPU else "cpu"


def jobs_option(what: str, usual: str) -> Any:
    """Declare `--jobs`; `usual` says how many there are by default."""
    return value("N", f"{what} at a time; 1 works in this process (default: {usual})", read=count)


def engine_option(what: str) -> Any:
    """Declare `--engine`."""
    help = f"where {what} run: processes of this machine, or a ray cluster"
    return choice(Engine, help, Engine.PROCESSES)


def execution_of(
    engine: Engine, jobs: int | None, threads: int | None, cache: str | None
) -> Execution:
    """Return how work is spread; the folder of the cache is made if it can be."""
    from kcdsl.route.catalogue import Execution
    from kcdsl.source.writing import make_folder

    folder: Path | None = None
    if cache is None:
        folder = _usual_cache()
    elif cache != "off":
        folder = Path(cache).resolve()
        make_folder(folder)
    return Execution(engine.value, jobs, threads, folder)


def _usual_cache() -> Path | None:
    """Return the folder of the cache where the user said nothing; None if there can be none."""
    from kcdsl.source.files import user_place

    base = user_place("XDG_CACHE_HOME", ".cache")
    if base is not None:
        folder = base / "kcdsl" / "certifier"
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            return folder
    print("note: there is no folder for the cache; nothing is remembered", file=sys.stderr)
    return None


def fingerprints_in(kernels: str | None) -> Fingerprints | None:
    """Return the fingerprints of the file that `--kernels` names."""
    if kernels is None:
        return None
    from kcdsl.release.triple import read_kernels

    return read_kernels(Path(kernels))
