"""What the profiles of hypothesis promise."""

from hypothesis import settings


def test_only_exploring_runs_are_random():
    """A profile inherits what it does not say from the one that is loaded when it is registered."""
    assert settings.get_profile("default").derandomize
    assert not settings.get_profile("explore").derandomize
