"""Data sets of the Hugging Face hub, for those who have no files of them."""

from __future__ import annotations

from typing import Any

_PROBE_SECONDS = 5


def hub_rows(repository: str, config: str | None, split: str) -> list[dict[str, Any]]:
    """The rows of one split. In the hub client's offline mode (HF_HUB_OFFLINE=1) they come from its cache.

    Raises ImportError without the package `datasets`, and ConnectionError, soon, where the hub does not
    answer or has no such data."""
    try:
        import datasets
    except ImportError as error:
        raise ImportError(f"{repository} is read with the package datasets: pip install datasets") from error
    from huggingface_hub import HfApi
    from huggingface_hub.constants import HF_HUB_OFFLINE

    try:
        if not HF_HUB_OFFLINE:
            # Without this the data sets' own client tries again and again, for minutes.
            HfApi().dataset_info(repository, timeout=_PROBE_SECONDS)
        return list(datasets.load_dataset(repository, config, split=split))
    except Exception as error:
        # The classes of connection errors change with the versions of the client's HTTP library.
        raise ConnectionError(
            f"{repository} cannot be had from the Hugging Face hub ({type(error).__name__}: {error})"
        ) from error
