"""Settings of all tests: reproducible examples, and one thread for models too small to share."""

from collections.abc import Iterator

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
