"""Random ids: length, no repeats among threads, and none in a forked process."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

from app.core.ids import MAX_BYTES, random_hex


def test_ids_have_the_length_that_was_asked_for() -> None:
    for n in (1, 6, MAX_BYTES):
        assert len(bytes.fromhex(random_hex(n))) == n


def test_threads_never_get_the_same_id() -> None:
    with ThreadPoolExecutor(4) as threads:
        parts = list(threads.map(lambda _: [random_hex(8) for _ in range(5_000)], range(8)))
    ids = [one for part in parts for one in part]
    assert len(set(ids)) == len(ids)


def test_a_forked_process_does_not_repeat_the_ids_of_its_parent() -> None:
    random_hex(8)  # from here on, bytes are at hand that a fork would copy
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.write(writing, random_hex(8).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        assert pipe.read() != random_hex(8)
