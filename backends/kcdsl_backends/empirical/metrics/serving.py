"""Times and memory of a serving stack, from the stamps of its requests (tier E)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kcdsl_backends.empirical.metrics.evidence import Unmeasured, column


@dataclass(frozen=True, slots=True)
class Served:
    """One request: when it came, and when each of its tokens was given out, in seconds."""

    arrived: float
    tokens: Sequence[float]


def time_to_first_token(served: Served) -> float:
    """Return TTFT in seconds."""
    return _stamps(served)[0] - served.arrived


def time_per_output_token(served: Served) -> float:
    """Return TPOT: the mean time between tokens after the first, in seconds.

    Raises Unmeasured for a request of one token.
    """
    stamps = _stamps(served)
    if len(stamps) < 2:
        raise Unmeasured("one token has no time between tokens")
    return (stamps[-1] - stamps[0]) / (len(stamps) - 1)


def latency(served: Served) -> float:
    """Return the time from the request to its last token, in seconds."""
    return _stamps(served)[-1] - served.arrived


def throughput(requests: Sequence[Served]) -> float:
    """Return tokens per second from the first arrival to the last token."""
    if not requests:
        raise Unmeasured("no requests")
    stamps = [_stamps(r) for r in requests]
    span = max(s[-1] for s in stamps) - min(r.arrived for r in requests)
    if not span > 0:
        raise Unmeasured("the requests took no time")
    return sum(len(s) for s in stamps) / span


def kv_memory(layers: int, heads: int, width: int, tokens: int, bytes_each: float) -> float:
    """Return the bytes of keys and values: 2 layers heads width tokens bytes_each."""
    sizes = (layers, heads, width, tokens, bytes_each)
    if min(sizes) <= 0:
        raise Unmeasured(f"a cache of {sizes} holds nothing")
    return 2 * layers * heads * width * tokens * bytes_each


def determinism_window(outputs: Mapping[str, Sequence[str]]) -> tuple[int, int]:
    """Return (equal, made): repeats whose output is that of the first run of the same request.

    `outputs` holds, per request, the digests of its runs. A request that ran once says nothing;
    raises Unmeasured where no request was repeated.
    """
    repeated = {key: runs for key, runs in outputs.items() if len(runs) > 1}
    if not repeated:
        raise Unmeasured("no request was repeated")
    equal = sum(run == runs[0] for runs in repeated.values() for run in runs[1:])
    return equal, sum(len(runs) - 1 for runs in repeated.values())


def _stamps(served: Served) -> Sequence[float]:
    stamps = column(served.tokens, "times of tokens")
    if not np.isfinite(served.arrived) or stamps[0] < served.arrived:
        raise Unmeasured("a token was given out before its request came")
    if bool((np.diff(stamps) < 0).any()):
        raise Unmeasured("the times of tokens do not ascend")
    return [float(s) for s in stamps]
