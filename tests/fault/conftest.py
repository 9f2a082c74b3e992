"""Settings for the fault tests."""

import pytest


@pytest.fixture(autouse=True)
def _long_form_on_demand(request):
    if request.node.get_closest_marker("slow") and "slow" not in str(request.config.getoption("markexpr")):
        pytest.skip("one more variant of a fault; run it with -m slow")
