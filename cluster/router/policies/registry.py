"""The policies by their names in the config. A new one is a file beside this one and its name here. See README.md."""

from collections.abc import Callable, Sequence

from cluster.router.policies.cost import Cost
from cluster.router.policies.dynamo_cost import DynamoCost
from cluster.router.policies.least_loaded import LeastLoaded
from cluster.router.policies.policy import Policy
from cluster.router.policies.power_of_two import PowerOfTwo
from cluster.router.policies.prefix import Prefix
from cluster.router.policies.random_choice import RandomChoice
from cluster.router.policies.round_robin import RoundRobin
from cluster.router.policies.sglang_cache_aware import SglangCacheAware

_ALL: Sequence[Callable[[], Policy]] = (
    RoundRobin,
    RandomChoice,
    LeastLoaded,
    PowerOfTwo,
    Prefix,
    SglangCacheAware,
    DynamoCost,
    Cost,
)
POLICIES = {policy().name: policy for policy in _ALL}
