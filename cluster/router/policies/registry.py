"""The policies by their names in the config. A new one is a file beside this one and a line here."""

from collections.abc import Callable

from cluster.router.policies.cost import Cost
from cluster.router.policies.least_loaded import LeastLoaded
from cluster.router.policies.policy import Policy
from cluster.router.policies.prefix import Prefix
from cluster.router.policies.round_robin import RoundRobin

POLICIES: dict[str, Callable[[], Policy]] = {
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "prefix": Prefix,
    "cost": Cost,
}
