"""A codec is chosen where the link is slower than it and somebody waits; what the ticket names is used as it is."""

import pytest

from kvtransfer.codecs.choice import TRIAL_BELOW, TRIAL_EVERY, CodecChoice
from kvtransfer.codecs.registry import CODECS

PIECE = 4 * 1024 * 1024


class Link:
    """Plays a link of a certain rate, busy for a share of the time."""

    def __init__(self, rate: float, busy: float = 1.0) -> None:
        self.now = 0.0
        self.choice = CodecChoice(self.now)
        self._rate = rate
        self._busy = busy

    def transfer(self, num_pieces: int = 3, ratio: float = 1.2, codec_rate: float = 1e9) -> str:
        """Move some pieces by the codec that is chosen, and return its name."""
        codec = self.choice.choose("auto")
        for piece in range(num_pieces):
            wire_bytes = PIECE
            if codec == "lossless":
                wire_bytes = round(PIECE / ratio)
                self.choice.coded(PIECE, wire_bytes, PIECE / codec_rate)
            self.choice.sent(self.now)
            self.now += wire_bytes / self._rate
            self.choice.arrived(PIECE, codec == "lossless", piece == num_pieces - 1, self.now)
        self.now += num_pieces * PIECE / self._rate * (1 - self._busy) / self._busy
        return codec


def test_a_slow_and_busy_link_gets_lossless_as_long_as_that_pays() -> None:
    link = Link(rate=100e6)

    chosen = [link.transfer() for _ in range(150)]

    assert chosen[0] == "raw"  # nothing is known yet
    assert chosen[-100:] == ["lossless"] * 100
    assert link.choice.link_rate == pytest.approx(100e6, rel=0.1)


@pytest.mark.parametrize(
    "link",
    [
        pytest.param(Link(rate=100e6, busy=0.2), id="idle most of the time"),
        pytest.param(Link(rate=2 * TRIAL_BELOW), id="faster than any core codes"),
    ],
)
def test_other_links_stay_raw(link: Link) -> None:
    assert {link.transfer() for _ in range(200)} == {"raw"}


@pytest.mark.parametrize(("ratio", "codec_rate"), [(1.03, 1e9), (1.2, 50e6)], ids=["does not shrink", "slow core"])
def test_what_does_not_pay_is_tried_once_in_a_while(ratio: float, codec_rate: float) -> None:
    link = Link(rate=100e6)

    chosen = [link.transfer(ratio=ratio, codec_rate=codec_rate) for _ in range(4 * TRIAL_EVERY)]

    assert 1 <= chosen.count("lossless") <= 5


def test_short_transfers_measure_delays_not_the_rate() -> None:
    choice = CodecChoice(0.0)
    for second in range(20):
        choice.sent(float(second))
        choice.arrived(1000, False, True, second + 0.9)

    assert choice.link_rate is None
    assert choice.choose("auto") == "raw"


def test_a_named_codec_is_used() -> None:
    link = Link(rate=1e12)
    for name in CODECS:
        assert link.choice.choose(name) == name
