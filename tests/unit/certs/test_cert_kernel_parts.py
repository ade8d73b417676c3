"""What of a kernel's fingerprint may differ, and what must be stated: by the checker's policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kcdsl_certs.policy import read_policy
from kcdsl_certs.reject import Reject
from kcdsl_certs.triple import PARTS, Contract, Kernel, Triple, relaxed, states
from kcdsl_certs.triple import Checkpoint as Weights


def triple(**changes: Any) -> Triple:
    gpu = {"model": "H100", "driver": changes.pop("driver", "550.54.15")}
    fingerprint = {
        "schema": "kcdsl.kernel-fingerprint/2",
        "software": {"torch": {"version": "2.13.0"}, "compiler": "g++ 12"},
        "hardware": {"processor": {"model": "EPYC"}, "gpu": gpu, "host": {"cores": 8}},
        "switches": {"environment": {}},
        **changes,
    }
    kernel = Kernel("torch.eager", fingerprint)
    return Triple(Weights("w", "0" * 64, "1" * 64), kernel, kernel, Contract("c", "1", "2" * 64))


def test_two_drivers_agree_only_where_the_policy_says_so() -> None:
    one, other = triple(), triple(driver="570.86.10")
    assert one.digest != other.digest
    assert relaxed(one, other, ["driver"]).digest == one.digest
    for part in PARTS.keys() - {"driver", "gpu"}:
        assert relaxed(one, other, [part]).digest != one.digest
    changed = triple(driver="570.86.10", switches={"environment": {"OMP_NUM_THREADS": "4"}})
    assert relaxed(one, changed, ["driver"]).digest != one.digest
    assert relaxed(one, changed, ["driver", "switches"]).digest == one.digest


def test_a_part_that_one_does_not_state_can_be_left_out_of_account() -> None:
    bare = triple()
    found = dict(bare.infer.fingerprint)
    del found["switches"]
    kernel = Kernel("torch.eager", found)
    without = Triple(bare.checkpoint, kernel, kernel, bare.contract)
    assert relaxed(bare, without, ["switches"]).digest == bare.digest
    assert relaxed(without, bare, ["switches"]).digest == without.digest
    assert not states(kernel, "switches")
    assert states(kernel, "driver")


def test_a_policy_names_parts(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text('relaxed-kernel-parts = ["driver"]\nrequired-kernel-parts = ["gpu"]\n')
    found = read_policy(path)
    assert (sorted(found.relaxed_parts), sorted(found.required_parts)) == (["driver"], ["gpu"])
    path.write_text('relaxed-kernel-parts = ["everything"]\n')
    with pytest.raises(Reject) as caught:
        read_policy(path)
    assert caught.value.reason == "policy/malformed"
