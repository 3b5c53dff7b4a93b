"""Redis, which several servers share: cached values, rate limits and hints of changes.

Redis makes requests faster and holds no data of record. A call counts as a miss if Redis does not
respond within ``RESPONSE_SECONDS``, or if the call gets no turn in that time. After failures the
client makes no calls until a background task reaches Redis again.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeout

from app.core.logging import get_logger
from app.core.security import TokenGrant, token_grant

log = get_logger(__name__)

RESPONSE_SECONDS = 0.05
PROBE_SECONDS = 1.0
MAX_CALLS = 8
"""The maximum number of concurrent calls. Further calls wait here, as they would within Redis."""
SLOW_SECONDS = RESPONSE_SECONDS / 2
"""The response time above which a call that gets no turn counts as late."""
MAX_LATE_CALLS = 5
"""The number of timeouts, without a quick response between them, after which Redis counts as
unavailable. A single timeout may be chance."""
VALUE_SECONDS = 3600
MAX_PENDING = 256
LISTEN_SECONDS = 5.0
HINT_SECONDS = 0.005
"""Interval between two hints of the same kind."""

# KEYS[1]: the bucket; ARGV: rate a second, burst. The server's own clock, so that servers agree.
_TAKE = """
local now = redis.call('TIME')
now = now[1] + now[2] / 1000000
local held = redis.call('HMGET', KEYS[1], 'tokens', 'at')
local rate, burst = tonumber(ARGV[1]), tonumber(ARGV[2])
local tokens, at = tonumber(held[1]) or burst, tonumber(held[2]) or now
tokens = math.min(burst, tokens + math.max(0, now - at) * rate)
local allowed = 0
if tokens >= 1 then
  tokens = tokens - 1
  allowed = 1
end
redis.call('HSET', KEYS[1], 'tokens', tostring(tokens), 'at', string.format('%.6f', now))
redis.call('PEXPIRE', KEYS[1], math.ceil(burst / rate * 1000) + 1000)
return {allowed, tostring(tokens)}
"""

OnHint = Callable[[], None]


def _nothing() -> None:
    pass


class RedisClient:
    """A client that also works without Redis. Call `start()` before use, await `close()` after."""

    def __init__(self, url: str, prefix: str) -> None:
        options: dict[str, Any] = {
            "socket_timeout": RESPONSE_SECONDS,
            "socket_connect_timeout": RESPONSE_SECONDS,
            # The default retries for seconds, while a request waits.
            "retry": Retry(NoBackoff(), 0),
        }
        self._client: redis.Redis = redis.Redis.from_url(url, **options)
        self._slots = asyncio.Semaphore(MAX_CALLS)
        self._late = 0
        self._last_seconds = 0.0  # that the last response took
        # The listener waits for messages: it has a time limit on connecting only.
        self._listener: redis.Redis = redis.Redis.from_url(
            url, **(options | {"socket_timeout": None, "socket_keepalive": True})
        )
        self._prefix = prefix
        self._take = self._client.register_script(_TAKE)
        self.available = False
        self.calls: dict[str, int] = {"hit": 0, "miss": 0, "stored": 0, "failed": 0}
        self._handlers: dict[bytes, OnHint] = {}
        self._hints: dict[str, bool] = {}
        """The kinds of hints in sending, and whether another hint of the kind came since."""
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self) -> None:
        """Start to connect and to listen."""
        for run in (self._watch, self._listen):
            self._spawn(run())

    async def close(self) -> None:
        """Stop the background tasks and close the connections."""
        for task in tuple(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=1)
        for client in (self._client, self._listener):
            with contextlib.suppress(RedisError, OSError):
                await client.aclose()

    # Values

    async def get(self, key: str) -> bytes | None:
        """The value of a key; None if the key is absent or Redis is unavailable."""
        if not self.available:
            return None
        value = await self._try(lambda: self._client.get(f"{self._prefix}:{key}"))
        self.calls["hit" if isinstance(value, bytes) else "miss"] += 1
        return value if isinstance(value, bytes) else None

    def put(self, key: str, value: bytes) -> None:
        """Store a value for an hour, if Redis is available. Returns at once."""
        if self.available and len(self._tasks) < MAX_PENDING:
            name = f"{self._prefix}:{key}"
            self._spawn(self._put(lambda: self._client.set(name, value, ex=VALUE_SECONDS)))

    async def _put(self, call: Callable[[], Awaitable[Any]]) -> None:
        if await self._try(call):
            self.calls["stored"] += 1

    # Rate limits

    async def take(self, caller: str, rate: float, burst: int) -> TokenGrant | None:
        """Take a token from the bucket that all servers share: see `TokenBuckets`."""
        if not self.available:
            return None
        key = f"{self._prefix}:bucket:{caller}"
        result = await self._try(lambda: self._take(keys=[key], args=[rate, burst]))
        if result is None:
            return None
        return token_grant(bool(result[0]), float(result[1]), rate, burst)

    # Hints

    def on_hint(self, kind: str, handler: OnHint) -> None:
        """Call ``handler`` when a server gives this hint, and when hints may have been missed."""
        self._handlers[kind.encode()] = handler

    def hint(self, kind: str) -> None:
        """Tell all servers of a change. Returns at once, and combines hints of one kind."""
        if not self.available:
            return
        in_progress = kind in self._hints
        self._hints[kind] = True
        if not in_progress:
            self._spawn(self._hint(kind))

    async def _hint(self, kind: str) -> None:
        try:
            while self._hints[kind]:
                self._hints[kind] = False
                await self._try(lambda: self._client.publish(f"{self._prefix}:hints", kind))
                await asyncio.sleep(HINT_SECONDS)
        finally:
            del self._hints[kind]

    async def _listen(self) -> None:
        while True:
            try:
                async with self._listener.pubsub() as channel:
                    await channel.subscribe(f"{self._prefix}:hints")
                    self._call_all()  # there may have been hints before
                    while True:
                        message = await channel.get_message(timeout=LISTEN_SECONDS)
                        if message is None:  # no hints, or a broken connection
                            await channel.ping()
                        elif message["type"] == "message":
                            self._handlers.get(message["data"], _nothing)()
            except (RedisError, OSError):
                pass
            await asyncio.sleep(PROBE_SECONDS)

    def _call_all(self) -> None:
        for handler in self._handlers.values():
            handler()

    # Availability

    async def _try(self, call: Callable[[], Awaitable[Any]]) -> Any:
        try:
            async with asyncio.timeout(RESPONSE_SECONDS):
                await self._slots.acquire()
        except TimeoutError as error:
            if self._last_seconds > SLOW_SECONDS:  # else there are only many calls
                self._count_late(error)
            self.calls["failed"] += 1
            return None
        try:
            if not self.available:
                return None  # it failed while this call waited
            started = time.monotonic()
            try:
                async with asyncio.timeout(RESPONSE_SECONDS):
                    answer = await call()
            except ResponseError as error:
                # Redis is available: it is full, or the key has another type.
                self._late = 0
                log.debug("redis refused", error=str(error))
            except (TimeoutError, RedisTimeout) as error:
                self._count_late(error)
            except (RedisError, OSError) as error:
                self._mark_unavailable(error)
            else:
                self._last_seconds = time.monotonic() - started
                if self._last_seconds <= SLOW_SECONDS:
                    self._late = 0
                return answer
        finally:
            self._slots.release()
        self.calls["failed"] += 1
        return None

    def _count_late(self, error: BaseException) -> None:
        self._late += 1
        if self._late >= MAX_LATE_CALLS:
            self._mark_unavailable(error)

    def _mark_unavailable(self, error: BaseException) -> None:
        if self.available:
            self.available, self._late = False, 0
            log.warning(
                "redis is unavailable; the server continues without redis",
                error=type(error).__name__,
            )

    async def _watch(self) -> None:
        """Try to reconnect every second while Redis is unavailable."""
        while True:
            if not self.available:
                try:
                    async with asyncio.timeout(RESPONSE_SECONDS * 4):
                        await self._client.ping()
                except (RedisError, OSError, TimeoutError):
                    pass
                else:
                    self.available = True
                    log.info("redis is available")
                    self._call_all()  # hints may have been lost
            await asyncio.sleep(PROBE_SECONDS)

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
