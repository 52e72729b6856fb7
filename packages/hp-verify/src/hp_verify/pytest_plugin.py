"""A fixture of pytest: `verify(job, against=...)` compares a job with its reference in a test."""

import shlex
from collections.abc import Callable

import pytest

import hp_verify


@pytest.fixture
def verify(request: pytest.FixtureRequest) -> Callable[..., "hp_verify.Comparison"]:
    """Return a function that compares a job with its reference, and fails the test if they differ.

    It takes the job and `against`, each a command line or a list of words, and arguments of
    `hp_verify.verify`; it returns the comparison. References are kept in pytest's cache.
    """
    compare: Callable[..., hp_verify.Comparison] = hp_verify.verify
    caches: pytest.Cache | None = getattr(request.config, "cache", None)

    def verified(
        job: str | list[str], *, against: str | list[str], **options: object
    ) -> "hp_verify.Comparison":
        both = (shlex.split(c) if isinstance(c, str) else c for c in (job, against))
        usual = {"minutes": 10.0, "cache": caches and caches.mkdir("hp-verify")}
        found = compare(*both, **{**usual, **options})
        if not found.is_equal:
            pytest.fail(hp_verify.report(found), pytrace=False)
        return found

    return verified
