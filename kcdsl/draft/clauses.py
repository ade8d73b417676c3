"""The clauses of a draft, by purpose: requirement, initial limit, and description."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

USUAL = "usual"
"""The origin of a limit that is not based on a run of this model."""


class DraftPurpose(StrEnum):
    """The purpose of a drafted contract."""

    SERVING = "serving"
    RL = "rl"
    RELEASE = "release"


class DraftEvidence(StrEnum):
    """The evidence of a drafted contract: both kernels run here, recorded tokens scored by the
    training kernel, or recordings of both sides."""

    RUN = "run"
    SCORED = "scored"
    RECORDED = "recorded"


@dataclass(frozen=True, slots=True)
class DraftClause:
    """One clause: `goal` compared with `limit` by `op`, and a sentence about it.

    `block` is that of a clause about all inputs of a region, whose goal names its slice; None for
    other clauses, on `slices`. `note` is the origin of the limit; `timed`: it is about the speed of
    this machine.
    """

    id: str
    goal: str
    op: str
    limit: str
    unit: str
    why: str
    level: str = "L2"
    slices: tuple[str, ...] = ("all",)
    then: str | None = None
    evidence: str | None = None
    note: str = USUAL
    timed: bool = False
    block: str | None = None

    @property
    def require(self) -> str:
        """Return the requirement as the contract states it."""
        unit = self.unit if self.unit in ("", "%") else f" {self.unit}"
        return f"{self.goal} {self.op} {self.limit}{unit}"


TRACE = ("build_fingerprint", "request_shape", "rng_seed", "sampling_params", "replay_signature")


def clauses_for(
    purpose: DraftPurpose,
    evidence: DraftEvidence,
    *,
    width: int | None,
    blocks: Sequence[str],
    long: bool,
    named: Sequence[str],
    replayed: bool = True,
    requests: int = 0,
) -> tuple[DraftClause, ...]:
    """Return the clauses of a purpose.

    Args:
        width: the width of the output states of an encoder; None for a model with logits.
        blocks: the blocks whose drift can be proved, the first ones of the model.
        long: whether there is a slice of long requests.
        named: the slices that columns of the data name.
        replayed: whether traces have the fields of runs; recordings have none.
        requests: how many rows the data has, where both kernels run here.
    """
    wide = ("all", "long") if long else ("all",)
    release = purpose is DraftPurpose.RELEASE
    found: list[DraftClause] = []
    if evidence is DraftEvidence.RUN:
        found += _proved(blocks if release else blocks[:1], ball=release)
    if evidence is not DraftEvidence.RUN:
        found += _of_rollouts(("all", *named))
    elif width is not None:
        found += _of_states(width, wide, named)
    else:
        found += _of_policies(purpose, wide, ("all", *named))
    if evidence is DraftEvidence.RUN:
        found += _of_times(release, requests)
    if replayed:
        found.append(_trace(release))
    return tuple(found)


_RATIO = DraftClause(
    "N-RATIO", "mean(abs(log_ratio))", "<=", "0.01", "nats",
    "Importance ratios of sampled tokens stay near 1; beyond, gradients are biased.",
    then="importance_correct",
)  # fmt: skip
_W_LOG_W = DraftClause(
    "N-W-LOG-W", "mean(w_log_w)", "<=", "1e-3", "nats",
    "The policy that samples is the one that is trained, up to this divergence.",
    then="importance_correct",
)  # fmt: skip


def _proved(blocks: Sequence[str], *, ball: bool) -> list[DraftClause]:
    found = [
        DraftClause(
            f"N-{block.upper().replace('_', '-')}",
            f"forall x in points(short): norm_inf(drift({block}, x))",
            "<=",
            "1",
            "",
            f"Proved: no run of both kernels moves an output of {block} further, on short prompts.",
            evidence="proof",
            block=block,
        )
        for block in blocks
    ]
    if ball and found:
        first = blocks[0]
        found.append(
            DraftClause(
                f"N-{first.upper().replace('_', '-')}-BALL",
                f"forall x in ball(short, 1e-4): norm_inf(drift({first}, x))",
                "<=",
                "2",
                "",
                f"Proved: the same for every input of {first} within 0.0001 of those.",
                evidence="proof",
                block=first,
            )
        )
    return found


def _of_policies(
    purpose: DraftPurpose, wide: tuple[str, ...], named: tuple[str, ...]
) -> list[DraftClause]:
    release = purpose is DraftPurpose.RELEASE
    kl = DraftClause(
        "N-KL", "p99(kl)", "<=", "0.02", "nats",
        "The next-token distributions of both kernels agree: 99 % of requests have a smaller KL "
        "divergence at every token.",
        slices=wide, then="guard", level="L3" if release else "L2",
    )  # fmt: skip
    if release:
        kl = replace(kl, then="fallback")
    top = DraftClause(
        "S-TOP1", "mean(top1_overlap)", ">=", "99", "%",
        "Both kernels choose the same likeliest token.",
        level="L3", slices=named,
    )  # fmt: skip
    if purpose is not DraftPurpose.RL:
        tv = DraftClause(
            "N-TV", "p99(tv)", "<=", "0.1", "",
            "No event is more likely under one kernel than under the other by more than this.",
            slices=("all",),
        )  # fmt: skip
        return [kl, tv, top] if release else [kl, top]
    return [_RATIO, _W_LOG_W, replace(kl, slices=("all",))]


def _of_states(width: int, wide: tuple[str, ...], named: Sequence[str]) -> list[DraftClause]:
    return [
        DraftClause(
            "N-HIDDEN",
            "p99(hidden_l2)",
            "<=",
            f"{0.05 * width**0.5:.2g}",
            "",
            "The hidden states of both kernels agree, about to 5 % of their norm.",
            slices=wide,
        ),
        DraftClause(
            "N-COSINE", "min(embedding_cosine)", ">=", "0.99", "",
            "Embeddings of both kernels point in one direction.",
            level="L3", slices=("all", *named),
        ),
    ]  # fmt: skip


def _of_rollouts(slices: tuple[str, ...]) -> list[DraftClause]:
    return [
        replace(_RATIO, slices=slices),
        _W_LOG_W,
        DraftClause(
            "N-K3", "mean(k3)", "<=", "1e-3", "nats",
            "The k3 estimate of the divergence, which trainers log.",
            level="L1",
        ),
    ]  # fmt: skip


_SHOWN = {95: 59, 90: 29, 80: 14}
"""Percentiles, and how many requests show each at 95 % if none is beyond; p50 takes 5."""
_FOR_MEANS = 20
"""Requests that a limit of the throughput takes."""


def _of_times(release: bool, requests: int) -> list[DraftClause]:
    percent = next((p for p, least in _SHOWN.items() if requests >= least), 50)
    found = [
        DraftClause(
            "R-LATENCY", f"p{percent}(latency)", "<=", "10", "s",
            "One forward pass of the inference kernel on a request.",
            level="L1", timed=True,
        )
    ]  # fmt: skip
    if release and requests >= _FOR_MEANS:
        found.append(
            DraftClause(
                "R-THROUGHPUT", "throughput", ">=", "1", "tok/s",
                "Tokens that the inference kernel reads in a second.",
                level="L1", timed=True,
            )
        )  # fmt: skip
    return found


def _trace(release: bool) -> DraftClause:
    return DraftClause(
        "O-TRACE", f"has(trace, [{', '.join(TRACE)}])", "", "", "",
        "Every request can be run again from its record.",
        level="L3" if release else "L2", note="", then="rollback" if release else "freeze",
    )  # fmt: skip
