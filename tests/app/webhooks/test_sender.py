"""One request to a receiver: what is sent, where it may go, and how it fails."""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import socket
import time
from typing import Any

import pytest

from app.webhooks import sender
from app.webhooks.sender import DeliveryError, is_public, send, signature_headers
from tests.app.webhooks.conftest import Received, Receiver, assert_signed

pytestmark = pytest.mark.anyio


async def test_a_message_is_posted_and_signed(receiver: Receiver) -> None:
    body = b'{"type":"job.ended"}'
    headers = signature_headers("whsec_" + base64.b64encode(b"k" * 32).decode(), "m", 7, body)
    # The example of the specification's own libraries: HMAC-SHA256 of "m.7.<body>".
    assert headers["webhook-id"] == "m"
    await send(receiver.url, headers, body, private=True)
    (one,) = receiver.received
    assert (one.path, one.body) == ("/hook?token=in-the-url", body)
    assert one.headers["host"] == f"127.0.0.1:{receiver.port}"
    assert one.headers["content-type"] == "application/json"
    now = int(time.time())
    for secret, key in (("0123456789abcdef", b"0123456789abcdef"), ("whsec_AAAA", b"\0\0\0")):
        assert_signed(Received("", signature_headers(secret, "m", now, body), body), key)


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0"),
        *("100.64.0.1", "224.0.0.1", "255.255.255.255", "192.0.2.1", "198.18.0.1"),
        *("::1", "::", "fe80::1", "fc00::1", "fec0::1", "ff02::1", "2001:db8::1"),
        # IPv4 within IPv6: mapped, 6to4, NAT64.
        *("::ffff:127.0.0.1", "2002:7f00:1::", "64:ff9b::a9fe:a9fe"),
    ],
)
def test_addresses_that_are_not_public_are_known(address: str) -> None:
    assert not is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1", "::ffff:8.8.8.8"])
def test_public_addresses_are_known(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "2130706433", "0x7f.1"])
async def test_a_private_address_is_refused_however_it_is_written(
    receiver: Receiver, host: str
) -> None:
    with pytest.raises(DeliveryError, match=r"not on the public internet|cannot be resolved"):
        await send(f"http://{host}:{receiver.port}/", {}, b"{}", private=False)
    assert receiver.received == []


async def test_a_name_is_resolved_once_and_the_checked_address_is_used(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def resolve(host: Any, port: Any, *args: Any, **options: Any) -> list[Any]:
        asked.append(host)
        # Another address from the second time on: DNS rebinding.
        address = "127.0.0.1" if len(asked) == 1 else "127.0.0.2"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    await send(f"http://hook.example:{receiver.port}/", {}, b"{}", private=True)
    assert asked == ["hook.example"]
    assert receiver.received[0].headers["host"] == f"hook.example:{receiver.port}"
    with pytest.raises(DeliveryError, match="public internet"):
        await send(f"http://hook.example:{receiver.port}/", {}, b"{}", private=False)


async def test_the_next_address_of_a_name_is_tried_where_one_refuses(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name with an address of either kind, of which a receiver may listen on one only."""
    addresses = ["127.0.0.2", "127.0.0.3", "127.0.0.1"]

    def resolve(host: Any, port: Any, *args: Any, **options: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    url = f"http://hook.example:{receiver.port}/"
    await send(url, {}, b"{}", private=True)
    assert [one.body for one in receiver.received] == [b"{}"]
    # One that takes a connection and then fails has perhaps taken the message: no other is tried.
    addresses.reverse()
    receiver.answers = [b"HTTP/1.1 500 No\r\n\r\n"]
    with pytest.raises(DeliveryError, match="answered 500"):
        await send(url, {}, b"{}", private=True)
    assert len(receiver.received) == 2
    del addresses[0]
    with pytest.raises(DeliveryError, match="cannot be reached"):
        await send(url, {}, b"{}", private=True)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1/\r\n\r\n", "redirects"),
        (b"HTTP/1.1 500 No\r\n\r\n", "answered 500"),
        (b"SSH-2.0-OpenSSH\r\n", "not HTTP"),
        (b"HTTP/1.1 two\r\n", "not HTTP"),
        (b"x" * 200_000, "not HTTP"),
        (b"HTTP/1.1 102 Processing\r\n\r\n" * 101, "not HTTP"),
    ],
)
async def test_other_answers_fail(receiver: Receiver, answer: bytes, says: str) -> None:
    receiver.answers = [answer]
    with pytest.raises(DeliveryError, match=says):
        await send(receiver.url, {}, b"{}", private=True)


async def test_an_interim_answer_is_passed_over(receiver: Receiver) -> None:
    receiver.answers = [b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 200 OK\r\n\r\n"]
    await send(receiver.url, {}, b"{}", private=True)


async def test_a_receiver_that_is_silent_drips_or_is_away_fails_in_time(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "TIMEOUT_SECONDS", 0.3)
    receiver.pause = 1
    with pytest.raises(DeliveryError, match="no answer within"):
        await send(receiver.url, {}, b"{}", private=True)

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(20):
            writer.write(b"H")
            await asyncio.sleep(0.05)

    server = await asyncio.start_server(drip, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(DeliveryError, match="no answer within"):
        await send(f"http://127.0.0.1:{port}/", {}, b"{}", private=True)
    with pytest.raises(DeliveryError, match=r"TLS|reached|answer"):
        await send(f"https://127.0.0.1:{port}/", {}, b"{}", private=True)
    server.close()
    with pytest.raises(DeliveryError, match="cannot be reached"):
        await send(f"http://127.0.0.1:{port}/", {}, b"{}", private=True)
