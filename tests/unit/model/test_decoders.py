"""Every form of the decoder is the program that transformers runs on the same checkpoint."""

from __future__ import annotations

import pytest

from tests.support.decoders import FORMS, distance_from_transformers, random_changes

pytest.importorskip("transformers")


@pytest.mark.parametrize("name", FORMS)
def test_a_form_is_the_program_of_transformers(name: str) -> None:
    assert distance_from_transformers(FORMS[name], 1) <= 1e-10


@pytest.mark.full
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("name", FORMS)
def test_a_random_configuration_is_the_program_of_transformers(name: str, seed: int) -> None:
    form = FORMS[name]
    assert distance_from_transformers(form, seed, **random_changes(form, seed)) <= 1e-10
