"""Settings of the load test's tests."""

from hypothesis import settings

# This machine may be busy: how long an example takes says nothing.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")
