"""Settings of all tests: reproducible examples, one thread for small models, and `--no-compiler`."""

from collections.abc import Iterator
from typing import NoReturn

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "reproducible",
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("reproducible")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-compiler", action="store_true", help="skip each test once it calls torch.compile")


def pytest_configure(config: pytest.Config) -> None:
    """Fixtures of a wide scope may compile, too, so `torch.compile` is replaced before any of them runs."""
    if config.getoption("--no-compiler"):

        def skip(*_: object, **__: object) -> NoReturn:
            pytest.skip("needs the compiler")

        torch.compile = skip  # type: ignore[assignment]


@pytest.fixture(autouse=True)
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    if request.node.get_closest_marker("real") is None:
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def nothing_compiled_yet() -> Iterator[None]:
    """A cache of the compiler that is empty."""
    from torch._inductor.utils import fresh_cache

    with fresh_cache():
        yield
