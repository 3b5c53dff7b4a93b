"""A typed client of the neural collaborative ranking service."""

from ncr_client.async_client import AsyncClient
from ncr_client.client import Client
from ncr_client.errors import JobFailedError, NotReachedError, ServiceError

__all__ = ["AsyncClient", "Client", "JobFailedError", "NotReachedError", "ServiceError"]
