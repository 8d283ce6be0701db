"""A driver as tools/peers has them, whose engine takes as long as its arguments say: RATE FACTOR [FAILS_AT]."""

from tools.peers.driver import TimedEngine, run


class PretendedEngine:
    """Answers at once with the times that an engine of `rate` tokens/s would need."""

    def __init__(self, rate: float, fails_at: str | None) -> None:
        self._rate = rate
        self._fails_at = fails_at

    def prefill(self, num_tokens: int, seed: int) -> float:
        if self._fails_at == "prefill":
            raise RuntimeError("no room")
        return num_tokens / self._rate

    def decode(self, batch: int, context: int, steps: int) -> list[float]:
        return [batch / self._rate] * steps


def load(arguments: list[str]) -> TimedEngine:
    rate, *fails_at = arguments
    if rate == "none":
        raise RuntimeError("no such model")
    print("an engine that prints what it does")  # noqa: T201
    return PretendedEngine(float(rate), fails_at[0] if fails_at else None)


if __name__ == "__main__":
    run(load)
