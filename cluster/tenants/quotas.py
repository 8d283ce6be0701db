"""What each tenant may use, measured against what it uses."""

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from baton_pb.v1 import common_pb2
from cluster.tenants.callers import Caller
from cluster.tenants.key_file import TenantRules
from cluster.tenants.shares import share
from common.clock import Clock
from common.errors import InvalidRequestError, OverloadedError, WorkerLostError
from common.wording import counted

_RETRY_AFTER_S = 1.0


class QuotaError(OverloadedError):
    """A tenant is at a limit of its own; the cluster may have room."""

    def __init__(self, tenant: str, words: str, retry_after_s: float) -> None:
        super().__init__(f"tenant {tenant} may have {words}", retry_after_s)
        self.subject = f"tenant:{tenant}"


class Bucket:
    """An allowance that fills at a steady rate up to a burst. It may be overdrawn; then it fills from below zero."""

    def __init__(self) -> None:
        self._level = math.inf
        self._filled_s = 0.0

    def take(self, amount: float, now: float, rate: float, burst: float) -> float:
        """Take an amount if it is there.

        Args:
            amount: at most `burst`.
            now: seconds; never goes back.
            rate: what comes in each second.
            burst: the most that is kept.

        Returns:
            0.0, or the seconds after which it will be there; nothing was taken then.
        """
        self._level = min(burst, self._level + (now - self._filled_s) * rate)
        self._filled_s = now
        if self._level >= amount:
            self._level -= amount
            return 0.0
        return (amount - self._level) / rate

    def spend(self, amount: float) -> None:
        """Take an amount that has been used already; a negative one is given back."""
        self._level -= amount


class TenantUse:
    """One tenant's use. Owned by the gateway's loop; plain functions."""

    def __init__(self, name: str, clock: Clock) -> None:
        self.name = name
        self.running = 0
        self.queued = 0
        self.requests_total = 0
        self.prompt_tokens = 0
        """Of finished requests, as the two below."""
        self.cached_tokens = 0
        self.output_tokens = 0
        """Handed out, also by requests that did not finish."""
        self.prefill_device_s = 0.0
        self.decode_device_s = 0.0
        self.cost: dict[str, float] = {}
        """Of finished requests, by currency."""
        self.refusals: Counter[str] = Counter()
        """By the rule that was met."""
        self.tokens = Bucket()
        self._clock = clock
        self._calls = Bucket()

    def call(self, rules: TenantRules) -> None:
        """Count a call.

        Raises:
            QuotaError: the tenant makes too many.
        """
        rate = rules.requests_per_s
        if rate is not None and (wait_s := self._calls.take(1.0, self._clock.now(), rate, max(1.0, rate))):
            raise self.refused("requests_per_s", f"{counted(f'{rate:g}', 'call')} a second", wait_s)

    @contextmanager
    def request(self, rules: TenantRules) -> Iterator["RequestUse"]:
        """Count a request from its arrival to its end.

        Raises:
            QuotaError: as many run as may.
        """
        most = rules.concurrent_max
        if most is not None and self.running >= most:
            raise self.refused(
                "concurrent_max", f"{counted(most, 'request')} at once (each choice counts)", _RETRY_AFTER_S
            )
        self.requests_total += 1
        self.running += 1
        use = RequestUse(self, rules, self._clock)
        try:
            yield use
        except (OverloadedError, WorkerLostError):
            use.give_back()
            raise
        finally:
            self.running -= 1

    @contextmanager
    def queueing(self, rules: TenantRules) -> Iterator[None]:
        """Count a request that waits for its placement.

        Raises:
            QuotaError: as many wait as may.
        """
        most = rules.queued_max
        if most is not None and self.queued >= most:
            raise self.refused("queued_max", f"{most} requests that wait", _RETRY_AFTER_S)
        self.queued += 1
        try:
            yield
        finally:
            self.queued -= 1

    def refused(self, rule: str, words: str, wait_s: float) -> QuotaError:
        """Count a refusal and return it."""
        self.refusals[rule] += 1
        return QuotaError(self.name, words, wait_s)


class RequestUse:
    """What one request has used of its tenant's allowance."""

    def __init__(self, tenant: TenantUse, rules: TenantRules, clock: Clock) -> None:
        self._tenant = tenant
        self._rules = rules
        self._clock = clock
        self._num_charged = 0

    def prompt(self, num_tokens: int) -> None:
        """Charge the prompt.

        Raises:
            InvalidRequestError: it is longer than the tenant's may be, or than the tenant may ever use at once.
            QuotaError: the tenant has used too many tokens of late.
        """
        rules, name = self._rules, self._tenant.name
        if rules.prompt_tokens_max is not None and num_tokens > rules.prompt_tokens_max:
            raise InvalidRequestError(
                f"prompt has {num_tokens} tokens, tenant {name} may send at most {rules.prompt_tokens_max}"
            )
        most = rules.tokens_per_min
        if most is None:
            return
        if num_tokens > most:
            raise InvalidRequestError(f"prompt has {num_tokens} tokens, tenant {name} may use {most} in a minute")
        if wait_s := self._tenant.tokens.take(num_tokens, self._clock.now(), most / 60.0, most):
            raise self._tenant.refused("tokens_per_min", f"{counted(most, 'token')} a minute", wait_s)
        self._num_charged = num_tokens

    def took(self, num_output_tokens: int) -> None:
        """Charge output tokens. What was spent on the prompt is not given back from now on."""
        self._tenant.output_tokens += num_output_tokens
        if num_output_tokens and self._rules.tokens_per_min is not None:
            self._num_charged = 0
            self._tenant.tokens.spend(num_output_tokens)

    def finished(self, usage: common_pb2.Usage) -> None:
        """Add what the whole request used, but for its output tokens, which were counted as they came."""
        self._tenant.prompt_tokens += usage.prompt_tokens
        self._tenant.cached_tokens += usage.cached_tokens
        self._tenant.prefill_device_s += usage.prefill_device_s
        self._tenant.decode_device_s += usage.decode_device_s
        if usage.HasField("cost"):
            cost = self._tenant.cost
            cost[usage.currency] = cost.get(usage.currency, 0.0) + usage.cost

    def give_back(self) -> None:
        """Give the prompt's charge back, if no token came: it was the cluster that failed."""
        if self._num_charged:
            self._tenant.tokens.spend(-self._num_charged)
            self._num_charged = 0


class Uses:
    """All tenants' use. As many as there are names in the key file, at most."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._tenants: dict[str, TenantUse] = {}

    def of(self, caller: Caller) -> TenantUse:
        """Return a tenant's use."""
        use = self._tenants.get(caller.name)
        if use is None:
            use = self._tenants[caller.name] = TenantUse(caller.name, self._clock)
        return use

    def check_share(self, caller: Caller, num_running: int, running_max: int) -> None:
        """Keep room for others: when a gateway is nearly full, a tenant may have its share of it and no more.

        Args:
            caller: who wants to start a request; anonymous ones cannot be told apart and have no shares.
            num_running: requests of all tenants.
            running_max: the most that may run.

        Raises:
            QuotaError: the tenant has its share.
        """
        if not caller.tenant:
            return
        use = self.of(caller)
        num_active = sum(1 for other in self._tenants.values() if other.running and other is not use) + 1
        most = share(running_max, num_running, num_active)
        if most is not None and use.running > most:  # this request is counted already
            raise use.refused("share", f"{most} of {running_max} requests while this gateway is full", _RETRY_AFTER_S)

    def all(self) -> list[TenantUse]:
        """Return every tenant's that has called, by name."""
        return [self._tenants[name] for name in sorted(self._tenants)]
