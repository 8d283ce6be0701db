"""How searches go that send whatever comes to mind: the same few messages in CI, or fresh ones for as long as asked."""

from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, settings

OPTION = "--fuzz-s"
_ENDLESS = 10**9


class Search(NamedTuple):
    """One search's limits."""

    seconds_max: float
    """For each kind of call; what is not tried then is not tried."""
    is_fresh: bool

    def settings(self, num_examples: int) -> settings:
        """Return hypothesis' settings; the number of examples is that of a search that is not fresh."""
        return settings(
            max_examples=_ENDLESS if self.is_fresh else num_examples,
            deadline=None,
            database=None,
            derandomize=not self.is_fresh,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(OPTION, type=float, default=None, help="Seconds for each kind of call, with fresh seeds.")


@pytest.fixture
def search(pytestconfig: pytest.Config) -> Search:
    seconds: float | None = pytestconfig.getoption(OPTION, None)
    return Search(2.5, False) if seconds is None else Search(seconds, True)
