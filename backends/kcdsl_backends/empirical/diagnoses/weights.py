"""Do both kernels hold the weights of the file, and do they compute with them?"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kcdsl.verdict.report import Precheck
from kcdsl_backends.empirical.diagnoses.localisation import Localised, first_of
from kcdsl_backends.empirical.diagnoses.model import not_applicable, outcome
from kcdsl_backends.empirical.diagnoses.noise import Noise
from kcdsl_backends.empirical.sources.kernels.run import Kernel


def weights_checksum(checkpoints: Mapping[str, str]) -> Precheck:
    """Both kernels must hold the weights of the file."""
    different = len(set(checkpoints.values())) != 1
    detail = ", ".join(f"{place} {digest[:12]}" for place, digest in sorted(checkpoints.items()))
    return outcome("weights_checksum", not different, detail or "no digest")


def stale_weights(noise: Noise | None, localised: Localised | None, cause: str | None) -> Precheck:
    """An error that no repair, mask or coarser format explains is that of other weights.

    `cause` is what has been named already; `value` is how many times its claims a side errs.
    """
    name = "stale_weights"
    if noise is None:
        return not_applicable(name, "no reference run")
    worst = max((0, 1), key=noise.ratio)
    strayed = () if localised is None else localised.other_weights
    shown = noise.shown(worst)
    if strayed and localised is not None:
        shown = f"{shown}; {first_of(strayed, localised.blocks)}"
    coarser = localised is not None and bool(localised.coarser)
    other = bool(strayed) or (bool(noise.beyond) and not coarser)
    good = cause is not None or not other
    return outcome(name, good, shown if good else f"other weights: {shown}", noise.ratio(worst))


def coarser_layer(localised: Localised | None, cause: str | None) -> Precheck:
    """Name the first block that computes in a coarser format than its kernel claims."""
    name = "coarser_layer"
    if localised is None:
        return not_applicable(name, "no reference run of blocks")
    coarser = localised.coarser
    if not coarser:
        return outcome(name, True, f"{localised.blocks} blocks compute as claimed", 0.0)
    count = float(len({s.block for s in coarser}))
    good = cause is not None or bool(localised.other_weights)
    return outcome(name, good, first_of(coarser, localised.blocks), count)


def watch_weights(kernels: Mapping[str, Kernel]) -> Callable[[], Mapping[str, str]]:
    """Return a function that names the kernels whose weights are other than they are now."""
    readers = {s: r for s, k in kernels.items() if (r := getattr(k, "weights_digest", None))}
    before = {side: read() for side, read in readers.items()}
    return lambda: {s: "changed" for s, read in readers.items() if read() != before[s]}


def weights_digests(train: Kernel, infer: Kernel, loaded: str, now: str) -> dict[str, str]:
    """Return the digests that must agree: of the weights as loaded, of the file as it is now, and
    of the weights each kernel was built from."""
    found = {"loaded": loaded, "file": now}
    for side, kernel in (("train", train), ("infer", infer)):
        model = getattr(kernel, "model", None)
        if model is not None:
            found[side] = model.checkpoint.sha256
    return found
