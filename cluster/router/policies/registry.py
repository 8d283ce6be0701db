"""The policies by their names: each class with a `name` and a `choose` in a module of this folder. See README.md."""

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TypeGuard

from cluster.router import policies
from cluster.router.policies.policy import Policy
from common.errors import ConfigError


def policies_of(package: ModuleType) -> Mapping[str, Callable[[], Policy]]:
    """Return the policies that the modules of a package define, by name; modules in the order of their names."""
    found: dict[str, Callable[[], Policy]] = {}
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        for _, defined in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
            if defined.__module__ == module.name and _is_policy(defined):
                assert defined.name not in found, f"two policies are named {defined.name}"
                found[defined.name] = defined
    return found


def _is_policy(defined: type) -> TypeGuard[type[Policy]]:
    return isinstance(vars(defined).get("name"), str) and callable(vars(defined).get("choose"))


POLICIES = policies_of(policies)


def policy_named(name: str) -> Policy:
    """Return a policy that has chosen nothing yet.

    Raises:
        ConfigError: none has that name.
    """
    check_policy(name)
    return POLICIES[name]()


def check_policy(name: str) -> None:
    """Refuse a name that no policy has.

    Raises:
        ConfigError: with the names that there are.
    """
    if name not in POLICIES:
        raise ConfigError(f"no policy {name!r}; there are {', '.join(POLICIES)}")
