"""Metrics of hidden states, of calibration, and of the running system."""

from __future__ import annotations

from fractions import Fraction
from functools import partial

from kcdsl.ir.terms import Family
from kcdsl.metrics.definition import (
    AGGREGATE,
    CACHE,
    CONFIDENCES,
    ONE_WHOLE,
    RANKED,
    STATES,
    MetricDefinition,
)
from kcdsl.units import BYTES, NATS, ONE, RATIO, THROUGHPUT, TIME

_STAMPS = ("arrived", "stamps")

_state = partial(MetricDefinition, needs=("hidden",), reads=STATES)
_calibration = partial(
    MetricDefinition,
    family=Family.STATISTICAL,
    kind="aggregate",
    counted="window",
    statistics=AGGREGATE,
    needs=("logits", "labels"),
    bias="biased",
)
_timed = partial(
    MetricDefinition,
    family=Family.RUNTIME,
    counted="request",
    needs=("timing",),
    tier="E",
    noisy=True,
    columns=_STAMPS,
)
_counter = partial(
    MetricDefinition,
    family=Family.RUNTIME,
    kind="aggregate",
    counted="window",
    statistics=AGGREGATE,
    tier="E",
)

DEFINITIONS = (
    _state(
        "hidden_l2",
        ONE,
        "l2 norm of the difference of hidden states",
        "||dh||_2",
        entry="states:hidden_l2",
    ),
    _state(
        "hidden_linf",
        ONE,
        "largest absolute difference of hidden states",
        "max |dh|",
        entry="states:hidden_linf",
    ),
    _state(
        "embedding_l2",
        ONE,
        "l2 norm of the difference of sentence embeddings",
        "||e_infer - e_train||_2",
        counted="request",
        entry="states:embedding_l2",
    ),
    _state(
        "embedding_cosine",
        ONE,
        "cosine of the two sentence embeddings",
        "1 - ||e_infer - e_train||^2 / 2",
        counted="request",
        better="higher",
        lower=-ONE_WHOLE,
        upper=ONE_WHOLE,
        entry="states:embedding_cosine",
    ),
    _calibration(
        "ece_gap",
        RATIO,
        "absolute difference of the expected calibration errors",
        "|ECE_train - ECE_infer|, 15 equal-mass bins, labels = next token of the text",
        upper=ONE_WHOLE,
        reads=CONFIDENCES,
        entry="policies:ece_gap",
    ),
    _calibration(
        "ace_gap",
        RATIO,
        "absolute difference of the adaptive calibration errors",
        "|ACE_train - ACE_infer|, five likeliest tokens, 15 equal-mass bins",
        upper=ONE_WHOLE,
        reads=RANKED,
        entry="policies:ace_gap",
    ),
    _calibration(
        "brier_gap",
        ONE,
        "absolute difference of the mean Brier scores",
        "|mean Brier score of infer - of train|, paired",
        upper=Fraction(2),
        reads=("brier_gap",),
        entry="policies:magnitude_of_mean",
    ),
    _calibration(
        "nll_gap",
        NATS,
        "absolute difference of the mean -ln probabilities of the next tokens",
        "|mean -ln of the next token of infer - of train|, paired",
        reads=("nll_gap",),
        entry="policies:magnitude_of_mean",
    ),
    _timed(
        "latency",
        TIME,
        "time of one forward pass over the request; of servers and recordings, from the "
        "request to its last token",
        "wall time of one forward pass, synchronised",
    ),
    _timed("ttft", TIME, "time from a request to its first token", "first token - arrival"),
    _timed(
        "tpot",
        TIME,
        "mean time between tokens after the first",
        "(last - first) / (tokens - 1)",
    ),
    _counter(
        "throughput",
        THROUGHPUT,
        "tokens per second over the window",
        "tokens / seconds",
        better="higher",
        needs=("timing",),
        noisy=True,
        valued="request",
        columns=_STAMPS,
    ),
    _counter(
        "peak_memory",
        BYTES,
        "largest memory in use",
        "largest memory of the process (CUDA: of the allocator)",
        statistics=AGGREGATE | {"max"},
        needs=("memory",),
        bias="upper_bound",
    ),
    _counter(
        "kv_memory",
        BYTES,
        "memory of keys and values",
        "largest 2 layers heads width tokens bytes",
        needs=("memory",),
        reads=(CACHE,),
        columns=("cache",),
        absent="a forward pass keeps no keys and values",
    ),
    _counter(
        "failure_rate",
        RATIO,
        "share of requests that failed",
        "failed requests / requests",
        needs=("outcomes",),
        upper=ONE_WHOLE,
        valued="request",
        columns=(),
    ),
    _counter(
        "determinism",
        RATIO,
        "share of repeated requests whose output is equal bit for bit",
        "equal outputs / repeats",
        better="higher",
        needs=("repeats",),
        upper=ONE_WHOLE,
        valued="request",
    ),
)
"""The metrics of states, of calibration, and of the clock, the memory and the outcomes of runs."""
