"""A greedy row's winner is what torch.argmax finds in its logits, and the rows that need logits get the same bits."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.cpu.build import Isa, supported_isas

Make = Callable[..., Any]
ISAS = supported_isas()
pytestmark = pytest.mark.skipif(not ISAS, reason="needs AVX2")
VOCAB = 211
"""14 panels, the last one with 13 columns of padding: two threads share them."""
NUM_TOKENS = 30


def _as_it_is(head: torch.Tensor) -> None:
    """Leave it."""


def _ties(head: torch.Tensor) -> None:
    """Repeat columns: far away, so that panels and threads tie, and side by side."""
    head[100:200] = head[:100]
    head[1:60:3] = head[0:59:3]


def _all_equal(head: torch.Tensor) -> None:
    head[:] = 0.0


def _all_negative_but_the_padding(head: torch.Tensor) -> None:
    head[:] = 0.0
    head[:, 5] = -1.0
    head[:, 6] = 1.0


def _beyond_all_numbers(head: torch.Tensor) -> None:
    """One huge weight makes a logit infinite, several make NaN of it."""
    head[7::9] = 0.0
    head[7::9, 5] = 3e38
    head[60::40, ::2] = 3e38
    head[60::40, 1::2] = -3e38


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("family", "weights", "change"),
    [
        pytest.param("Llama", "fp32", _as_it_is, id="fp32"),
        pytest.param("Llama", "w8", _as_it_is, id="8 bits"),
        pytest.param("Llama", "q4", _as_it_is, id="4 bits"),
        pytest.param("Llama", "fp32", _ties, id="ties"),
        pytest.param("Llama", "w8", _ties, id="ties in 8 bits"),
        pytest.param("Llama", "fp32", _all_equal, id="all equal"),
        pytest.param("Llama", "fp32", _all_negative_but_the_padding, id="half of them negative"),
        pytest.param("Llama", "fp32", _beyond_all_numbers, id="infinite and NaN"),
        pytest.param("Gemma2", "fp32", _as_it_is, id="squeezed"),
    ],
)
def test_winners_are_the_first_of_the_greatest_logits(
    make: Make,
    make_model: Callable[..., Path],
    family: str,
    weights: str,
    change: Callable[[torch.Tensor], None],
    isa: Isa,
    threads: int,
) -> None:
    folder = make_model(family, vocab_size=VOCAB)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors["lm_head.weight"])
    save_file(tensors, file, {"format": "pt"})
    harness, random = make(folder, weights=weights, isa=isa, threads=threads), Random(1)
    batch = harness.batch(([random.randrange(VOCAB) for _ in range(NUM_TOKENS)], 0, [0, 1]))
    exact = harness.backend.forward(batch.asking_all()).logits.clone()

    for num_logit_rows, num_greedy_rows in ((0, 1), (0, NUM_TOKENS), (3, 20), (20, 3), (1, 1), (0, 0)):
        counts = (num_logit_rows, num_greedy_rows)
        asked, greedy = (torch.tensor(random.sample(range(NUM_TOKENS), count)).long() for count in counts)
        logits, winners = harness.backend.forward(replace(batch, logit_rows=asked, greedy_rows=greedy))

        assert winners.tolist() == exact[greedy].argmax(-1).tolist()
        assert torch.equal(logits.contiguous().view(torch.int32), exact[asked].view(torch.int32))  # NaN equals NaN


def test_a_greedy_row_beyond_the_batch_is_refused(make: Make, make_model: Callable[..., Path]) -> None:
    harness = make(make_model("Llama"))
    batch = harness.batch(([1, 2], 0, [0]))

    with pytest.raises(ValueError, match="a greedy row is beyond the batch"):
        harness.backend.forward(replace(batch, greedy_rows=torch.tensor([2])))
