"""A pytest plugin: test files that cannot be collected end the tests, also where several workers collect them.

Without workers pytest does so itself. With them it only counts an error, and a later run of what failed does not know
those files, so all of their tests would be missed.
"""

from __future__ import annotations

import pytest


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    errors = () if reporter is None else reporter.stats.get("error", ())
    if any(isinstance(one, pytest.CollectReport) for one in errors):
        session.exitstatus = pytest.ExitCode.INTERRUPTED
