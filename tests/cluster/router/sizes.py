"""How much memory an object holds, with all that only it leads to."""

import gc
import sys
import types

_SHARED = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)


def reachable_bytes(root: object) -> int:
    """Return the size of everything that can be reached from `root`; code is not followed."""
    seen = {id(root)}
    left, total = [root], 0
    while left:
        one = left.pop()
        total += sys.getsizeof(one)
        for referent in gc.get_referents(one):
            if id(referent) not in seen and not isinstance(referent, _SHARED):
                seen.add(id(referent))
                left.append(referent)
    return total
