"""What runs where: the one table that both the compose file and the topology follow."""

from __future__ import annotations

from dataclasses import dataclass

PORT = 8000

NCR_ENVIRONMENT = ("NCR_DATA_DIR", "NCR_DATABASE_URL", "NCR_REDIS_URL", "NCR_ADMIN_KEY")

REDIS_FLAGS = ("--save", "", "--maxmemory", "256mb", "--maxmemory-policy", "allkeys-lru")
"""Nothing is kept on disk, and what has not been asked for longest makes room."""


@dataclass(frozen=True)
class Service:
    """One kind of process: its command, the environment it is given, how many there are.

    ``{host}`` and ``{port}`` in a command are where it listens; an empty one is the image's own.
    """

    command: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
    port: int | None = None
    published: bool = False
    replicas: int = 1

    def command_line(self, host: str = "0.0.0.0", port: int | None = None) -> tuple[str, ...]:  # noqa: S104
        """The command with its place filled in; by default that of the compose file."""
        return tuple(part.format(host=host, port=port or self.port) for part in self.command)


SERVICES: dict[str, Service] = {
    "migrate": Service(("ncr", "db", "upgrade"), NCR_ENVIRONMENT),
    "api": Service(
        ("ncr", "serve", "--host", "{host}", "--port", "{port}"),
        NCR_ENVIRONMENT,
        port=PORT,
        replicas=2,
    ),
    "worker": Service(("ncr", "worker"), NCR_ENVIRONMENT, replicas=2),
    "proxy": Service(port=PORT, published=True),
    "postgres": Service(environment=("POSTGRES_USER", "POSTGRES_PASSWORD", "POSTGRES_DB")),
    "redis": Service(("redis-server", *REDIS_FLAGS)),
}
