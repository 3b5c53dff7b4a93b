"""A typed client of the neural collaborative ranking service."""

from ncr_client.async_client import AsyncClient
from ncr_client.calls import (
    JobFailedError,
    NotReachedError,
    RequestError,
    ServiceError,
    with_event_ids,
)
from ncr_client.client import Client

__all__ = [
    "AsyncClient",
    "Client",
    "JobFailedError",
    "NotReachedError",
    "RequestError",
    "ServiceError",
    "with_event_ids",
]
