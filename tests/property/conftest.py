"""Settings for the property tests."""

import logging

import pytest


@pytest.fixture(scope="module")
def quiet():
    """Thousands of simulated faults are logged as what they are."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
