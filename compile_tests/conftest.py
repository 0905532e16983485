"""Settings of all tests: reproducible examples, a cache of the compiler for each run, one thread for small
models, and `--no-compiler`."""

import os
import tempfile
from collections.abc import Iterator
from typing import NoReturn

import pytest
import torch
from hypothesis import HealthCheck, settings

_COMMON = {
    "deadline": None,
    "print_blob": True,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}
settings.register_profile("reproducible", max_examples=40, derandomize=True, **_COMMON)
settings.register_profile("thorough", max_examples=1000, **_COMMON)
settings.load_profile("reproducible")  # unless --hypothesis-profile names another one


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-compiler", action="store_true", help="skip each test once it calls torch.compile")


def pytest_configure(config: pytest.Config) -> None:
    """What one test has compiled all others of the run take over, those of other workers, too. Fixtures of a
    wide scope may compile, so `torch.compile` is replaced before any of them runs."""
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        folder = tempfile.TemporaryDirectory(prefix="inertiakv-tests-", ignore_cleanup_errors=True)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder.name
        config.add_cleanup(folder.cleanup)
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
