"""What a body takes to read is told from the commas and brackets that are in no text."""

import json

import pytest

from cluster.gateway.http.body_values import LIST_WEIGHT, num_values


@pytest.mark.parametrize(
    ("body", "commas", "lists"),
    [
        pytest.param({"prompt": [1, 2, 3]}, 2, 2, id="ids"),
        pytest.param({"prompt": [[1, 2], [3]], "n": 2}, 3, 4, id="a batch"),
        pytest.param({"prompt": "a, b, [c] {d}"}, 0, 1, id="a text"),
        pytest.param({"prompt": 'say "a, b": \\', "stop": ["\\\\", '"', ","]}, 3, 2, id="quotes and backslashes"),
        pytest.param(7, 0, 0, id="a number"),
    ],
)
def test_values_are_counted_outside_of_texts(body: object, commas: int, lists: int) -> None:
    assert num_values(json.dumps(body).encode()) == commas + LIST_WEIGHT * lists
