"""The least time, of this request and of those it hinders, within the targets. See README.md."""

from random import Random

from cluster.router.pairs import Margin
from cluster.router.policies.policy import Choice
from cluster.router.question import Question
from cluster.router.weighing import NEARLY, NEARLY_S, weigh

_EQUAL = Margin(NEARLY, NEARLY_S)


class Cost:
    """Predicts, for each pair worth considering, all that a placement costs in seconds, and takes the cheapest."""

    name = "cost"

    def choose(self, question: Question, rng: Random) -> Choice:
        """See Policy."""
        pairs = weigh(question, rng)
        best = rng.choice(pairs.nearly_least(_EQUAL))
        reason = f"cost: {best.total_s:.3g} s, the least of {len(pairs)} pairs; TTFT {best.first.ttft_s:.3g} s expected"
        return Choice(best.decode, best.prefill, reason, pairs, best)
