"""What several servers share through Redis. All of it may be missing at any time.

Redis makes things faster and never decides what is true: whatever it does not answer within some
milliseconds is done without it, and then it is left alone until a background task reaches it again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeout

from app.core.limits import Taken, verdict
from app.core.logging import get_logger

log = get_logger(__name__)

ANSWER_SECONDS = 0.05
PROBE_SECONDS = 1.0
MAX_CALLS = 8
"""At a time; others wait for their turn. More would only wait for one another within the server."""
LATE_IN_A_ROW = 5
"""Calls without an answer in time, after which it is away: a busy moment of our own is not that."""
VALUE_SECONDS = 3600
MAX_PENDING = 256
SILENT_SECONDS = 5.0
QUIET_SECONDS = 0.005
"""Between two hints of the same kind."""

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


class Shared:
    """A Redis, as far as it can be had. ``start()`` before use, ``close()`` after."""

    def __init__(self, url: str, prefix: str) -> None:
        options: dict[str, Any] = {
            "socket_timeout": ANSWER_SECONDS,
            "socket_connect_timeout": ANSWER_SECONDS,
            # The default tries again for seconds, with a request waiting.
            "retry": Retry(NoBackoff(), 0),
        }
        self._client: redis.Redis = redis.Redis.from_url(url, **options)
        self._turns = asyncio.Semaphore(MAX_CALLS)
        self._late = 0
        # Listening is waiting: no time limit on answers, only on connecting.
        self._listener: redis.Redis = redis.Redis.from_url(
            url, **(options | {"socket_timeout": None, "socket_keepalive": True})
        )
        self._prefix = prefix
        self._take = self._client.register_script(_TAKE)
        self.available = False
        self.calls: dict[str, int] = {"hit": 0, "miss": 0, "stored": 0, "failed": 0}
        self._handlers: dict[bytes, OnHint] = {}
        self._hints: dict[str, bool] = {}
        """Those under way, and whether there was another since."""
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self) -> None:
        """Begin to look for the server, and to listen."""
        for run in (self._watch, self._listen):
            self._spawn(run())

    async def close(self) -> None:
        for task in tuple(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=1)
        for client in (self._client, self._listener):
            with contextlib.suppress(RedisError, OSError):
                await client.aclose()

    # Values

    async def get(self, key: str) -> bytes | None:
        """A value; None where there is none or it cannot be had."""
        if not self.available:
            return None
        found = await self._try(lambda: self._client.get(f"{self._prefix}:{key}"))
        self.calls["hit" if isinstance(found, bytes) else "miss"] += 1
        return found if isinstance(found, bytes) else None

    def put(self, key: str, value: bytes) -> None:
        """Keeps a value for an hour, if it can; does not wait for it."""
        if self.available and len(self._tasks) < MAX_PENDING:
            name = f"{self._prefix}:{key}"
            self._spawn(self._put(lambda: self._client.set(name, value, ex=VALUE_SECONDS)))

    async def _put(self, call: Callable[[], Awaitable[Any]]) -> None:
        if await self._try(call):
            self.calls["stored"] += 1

    # Rate limits

    async def take(self, caller: str, rate: float, burst: int) -> Taken | None:
        """See `app.core.limits.Buckets`: the bucket that all servers share."""
        if not self.available:
            return None
        key = f"{self._prefix}:bucket:{caller}"
        found = await self._try(lambda: self._take(keys=[key], args=[rate, burst]))
        if found is None:
            return None
        return verdict(bool(found[0]), float(found[1]), rate, burst)

    # Hints

    def on_hint(self, kind: str, handler: OnHint) -> None:
        """Has ``handler`` called when some server gives this hint, and after any may be missed."""
        self._handlers[kind.encode()] = handler

    def hint(self, kind: str) -> None:
        """Tells all servers to look; does not wait. Many at once become few."""
        if not self.available:
            return
        under_way = kind in self._hints
        self._hints[kind] = True
        if not under_way:
            self._spawn(self._hint(kind))

    async def _hint(self, kind: str) -> None:
        try:
            while self._hints[kind]:
                self._hints[kind] = False
                await self._try(lambda: self._client.publish(f"{self._prefix}:hints", kind))
                await asyncio.sleep(QUIET_SECONDS)
        finally:
            del self._hints[kind]

    async def _listen(self) -> None:
        while True:
            try:
                async with self._listener.pubsub() as channel:
                    await channel.subscribe(f"{self._prefix}:hints")
                    self._call_all()  # something may have happened while nobody listened
                    while True:
                        message = await channel.get_message(timeout=SILENT_SECONDS)
                        if message is None:  # it may be quiet, or gone without a word
                            await channel.ping()
                        elif message["type"] == "message":
                            self._handlers.get(message["data"], _nothing)()
            except (RedisError, OSError):
                pass
            await asyncio.sleep(PROBE_SECONDS)

    def _call_all(self) -> None:
        for handler in self._handlers.values():
            handler()

    # Whether it is there

    async def _try(self, call: Callable[[], Awaitable[Any]]) -> Any:
        async with self._turns:
            if not self.available:
                return None  # gone while this waited for its turn
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    answer = await call()
            except ResponseError as error:
                # It is there and refuses: it is full, or something else bears that name.
                self._late = 0
                log.debug("redis refused", error=str(error))
            except (TimeoutError, RedisTimeout) as error:
                self._late += 1
                if self._late >= LATE_IN_A_ROW:
                    self._gone(error)
            except (RedisError, OSError) as error:
                self._gone(error)
            else:
                self._late = 0
                return answer
        self.calls["failed"] += 1
        return None

    def _gone(self, error: BaseException) -> None:
        if self.available:
            self.available, self._late = False, 0
            log.warning("redis is away: going on without it", error=type(error).__name__)

    async def _watch(self) -> None:
        """Tries again every second while it is away. Nobody waits for this."""
        while True:
            if not self.available:
                try:
                    async with asyncio.timeout(ANSWER_SECONDS * 4):
                        await self._client.ping()
                except (RedisError, OSError, TimeoutError):
                    pass
                else:
                    self.available = True
                    log.info("redis is there")
                    self._call_all()  # others may have had no way to say it
            await asyncio.sleep(PROBE_SECONDS)

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
