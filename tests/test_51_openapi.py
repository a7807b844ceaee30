"""The OpenAPI schema is true: requests generated from it, valid or not, never end in a 500."""

from collections.abc import Iterator
from functools import partial

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error

from minigen.server.app import create_service
from minigen.server.models import ModelHost
from tests.serving import engine_of, is_empty, load_tiny, save_tiny, serving
from tests.waiting import wait_until

MODEL = "smollm2-135m"
NUM_EXAMPLES = 25  # requests to each endpoint, of each kind
ENDPOINTS = {
    *("POST /v1/chat/completions", "POST /v1/completions", "POST /tokenize", "POST /detokenize"),
    *("POST /v1/messages", "POST /v1/messages/count_tokens"),
    *("POST /v1/responses", "GET /v1/responses/{response_id}"),
    *("POST /api/generate", "POST /api/chat", "POST /api/show"),
    *("GET /api/tags", "GET /api/ps", "GET /api/version"),
    *("GET /v1/models", "GET /v1/models/{name}", "GET /health", "GET /ready", "GET /version"),
}
SETTINGS = settings(
    max_examples=NUM_EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> ModelHost:
    directory = save_tiny(tmp_path_factory.mktemp("tiny"), context=64)
    return ModelHost({MODEL: partial(load_tiny, directory)})


@pytest.fixture(scope="module")
def api(host: ModelHost) -> Iterator[schemathesis.BaseSchema]:
    with serving(host, create_service(host)) as url:
        yield schemathesis.openapi.from_url(f"{url}/openapi.json")


# Hypothesis requires that a strategy leaves Python's global random numbers unchanged. It cannot
# distinguish the strategy from the server's threads, which run in this process, too.
@pytest.mark.filterwarnings("ignore:Do not use the .random. module inside strategies")
@pytest.mark.parametrize("mode", list(GenerationMode))
def test_no_request_causes_a_server_error(
    api: schemathesis.BaseSchema, host: ModelHost, mode: GenerationMode
) -> None:
    operations = [each.ok() for each in api.get_all_operations()]
    assert {each.label for each in operations} >= ENDPOINTS
    statuses: set[int] = set()
    for operation in operations:
        if mode.is_negative and operation.method != "post":
            continue  # it has nothing that could be wrong

        @SETTINGS
        @given(case=operation.as_strategy(generation_mode=mode))
        def check(case: schemathesis.Case) -> None:
            if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
                case.body["model"] = MODEL  # any other is a 404
            statuses.add(case.call_and_validate(checks=[not_a_server_error]).status_code)

        check()
    assert (400 if mode.is_negative else 200) in statuses
    wait_until(lambda: is_empty(engine_of(host)))
