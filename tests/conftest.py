"""Settings for all tests."""

from hypothesis import HealthCheck, settings

# No test may depend on an absolute time: the machine may be busy.
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("default")
