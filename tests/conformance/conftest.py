from __future__ import annotations

import pytest
from helpers import FIXED, Case, case_id, cases, tiny_llama

from qattn_hf import list_methods


@pytest.fixture(params=cases(), ids=case_id)
def case(request: pytest.FixtureRequest) -> Case:
    """Every method and variant."""
    return request.param


@pytest.fixture(params=[*cases(), *FIXED], ids=case_id)
def row_case(request: pytest.FixtureRequest) -> Case:
    """As `case`, for settings that keep more data per row."""
    return request.param


@pytest.fixture(params=list_methods())
def method(request: pytest.FixtureRequest) -> str:
    """Every method with its defaults."""
    return request.param


@pytest.fixture
def model():
    """A stock model, fresh for each test."""
    return tiny_llama()
