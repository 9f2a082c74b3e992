"""Settings for all tests."""

import os

import pytest
from hypothesis import HealthCheck, settings

# No test may depend on an absolute time: the machine may be busy. What is generated is the same in every run, so that a
# run turns red by what was changed; --hypothesis-profile=explore looks for what nobody has seen yet.
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=False)
settings.load_profile("default")

# torchrun's store asks a name server for each client that connects. A lost query costs glibc 5 s by default, and for as
# long the store answers nobody.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
# Every test and every process that it starts has one of two cores at most.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def _long_form_on_demand(request):
    if request.node.get_closest_marker("slow") and "slow" not in str(request.config.getoption("markexpr")):
        pytest.skip("long form; run it with -m slow")
