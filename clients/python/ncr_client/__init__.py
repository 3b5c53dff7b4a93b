"""A typed client of the neural collaborative ranking service."""

from ncr_client.async_client import AsyncClient
from ncr_client.calls import with_event_ids
from ncr_client.client import Client
from ncr_client.errors import JobFailedError, NotReachedError, RequestError, ServiceError

__all__ = [
    "AsyncClient",
    "Client",
    "JobFailedError",
    "NotReachedError",
    "RequestError",
    "ServiceError",
    "with_event_ids",
]
