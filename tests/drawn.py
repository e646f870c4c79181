"""How the tests that hypothesis draws are run.

In ``make test`` always the same cases, so that it says the same of the same code: a case that once failed
stands beside the drawn ones as an ``@example``. ``make conformance`` looks for new ones, at random and many
times as many; a failure there prints the line (``@reproduce_failure``) that brings its case back.
"""

from hypothesis import HealthCheck, settings

#: A case writes over what the one before it wrote into a fixture of the function; load decides about none.
_SHARED = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
}
settings.register_profile("default", derandomize=True, **_SHARED)
settings.register_profile("search", print_blob=True, **_SHARED)
settings.load_profile("default")  # `pytest --hypothesis-profile search` loads the other one


def examples(usual: int, searched: int | None = None) -> int:
    """The number of cases: ``usual`` in ``make test``, ``searched`` (ten times as many) in a search."""
    if settings.get_current_profile_name() == "search":
        return 10 * usual if searched is None else searched
    return usual
