"""Whatever a client sends to the paths of `/openapi.json`, the answer is one that it promises, and never a 500."""

import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import schemathesis
from hypothesis import given
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from cluster.gateway.http.openapi import document
from tests.cluster.gateway.any_message import TimeIsUpError
from tests.cluster.gateway.conftest import Search
from tests.cluster.running_cluster import running_cluster

EXAMPLES = 12
"""Of each path that takes a body, right ones and as many wrong ones."""
MODES = (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)
CHECKS = [not_a_server_error, content_type_conformance, response_schema_conformance, status_code_conformance]


def answers_of(operation: Any, mode: schemathesis.GenerationMode, search: Search) -> Counter[int]:
    """Send what comes to schemathesis' mind; return how many answers had which code."""
    answers = Counter[int]()
    deadline = time.monotonic() + search.seconds_max
    cases = operation.as_strategy(generation_mode=mode)

    @given(cases)
    @search.settings(EXAMPLES if operation.body else 3)
    def ask(case: Any) -> None:
        if time.monotonic() > deadline:
            raise TimeIsUpError
        response = case.call()
        answers[response.status_code] += 1
        is_late = response.status_code == 504 and "timeout" in str((case.body, case.headers))  # as it asked for
        case.validate_response(response, checks=CHECKS[1:] if is_late else CHECKS)

    with suppress(TimeIsUpError):
        ask()
    return answers


def test_no_request_gets_an_answer_that_the_document_does_not_promise(model_dir: Path, search: Search) -> None:
    with running_cluster(model_dir) as cluster:
        schema = schemathesis.openapi.from_dict(dict(document()))
        schema.config.update(base_url=f"http://{cluster.gateway.http_address}")
        answers = Counter[int]()

        found: Any
        for found in schema.get_all_operations():
            operation = found.ok()
            for mode in MODES if operation.body else MODES[:1]:  # there is no wrong way to ask without a body
                answers += answers_of(operation, mode, search)

        assert answers[200]
        assert answers[400]
