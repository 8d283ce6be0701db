"""What an output must look like -> the constraint that workers obey; made on the tokenizer's thread."""

from collections import OrderedDict

from baton_pb.v1 import common_pb2
from cluster.gateway.tokenizing import Tokenizing
from common.config import RequestLimitsConfig
from common.grammar import constraint_of, form_of

_KEPT_MAX = 256
"""With schemas of the largest size, 16 MiB."""


class Constraints:
    """Owned by the gateway's loop."""

    def __init__(self, tokenizing: Tokenizing, limits: RequestLimitsConfig) -> None:
        self._tokenizing = tokenizing
        self._limits = limits
        self._kept: OrderedDict[bytes, str] = OrderedDict()

    async def of(self, grammar: common_pb2.Grammar) -> str:
        """Return the constraint of a client's grammar.

        Raises:
            InvalidRequestError: naming the part that cannot be obeyed.
        """
        key = grammar.SerializeToString(deterministic=True)
        constraint = self._kept.get(key)
        if constraint is None:
            constraint = await self._tokenizing.on_thread(lambda: self._make(grammar))
            self._kept[key] = constraint
            while len(self._kept) > _KEPT_MAX:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return constraint

    def _make(self, grammar: common_pb2.Grammar) -> str:
        return constraint_of(form_of(grammar, self._limits.schema_bytes_max, self._limits.schema_depth_max))
