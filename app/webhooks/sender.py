"""One signed request to a receiver at a checked address.

The module resolves the name, checks the addresses and connects to a checked address. A name that
resolves to another address a moment later therefore has no effect. The request follows no redirects
and uses no proxies, and the module reads only the status of the answer.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import ipaddress
import socket
import ssl
from urllib.parse import SplitResult, urlsplit

TIMEOUT_SECONDS = 10.0  # of the whole request
MAX_HEADERS = 100  # of an interim answer
SECRET_PREFIX = "whsec_"  # noqa: S105 - the mark of a secret in base64

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_NAT64 = ipaddress.ip_network("64:ff9b::/96")


class DeliveryError(Exception):
    """The receiver did not take a message. The text of the error contains no URL."""


def signature_headers(secret: str, message_id: str, at_s: int, body: bytes) -> dict[str, str]:
    """The headers of Standard Webhooks: id, time in seconds, HMAC-SHA256 over both and the body."""
    signed = b".".join([message_id.encode(), str(at_s).encode(), body])
    digest = hmac.new(secret_key(secret), signed, hashlib.sha256).digest()
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(at_s),
        "webhook-signature": f"v1,{base64.b64encode(digest).decode()}",
    }


def secret_key(secret: str) -> bytes:
    """The key of a secret: the decoded base64 after `whsec_`, or the bytes of any other string."""
    if secret.startswith(SECRET_PREFIX):
        try:
            return base64.b64decode(secret.removeprefix(SECRET_PREFIX), validate=True)
        except binascii.Error:
            pass
    return secret.encode()


def is_public(address: Address) -> bool:
    """Whether an address and all addresses within it belong to the public internet."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
        if address in _NAT64:
            inner.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        if not all(is_public(one) for one in inner if one is not None):
            return False
        if address.ipv4_mapped is not None:
            return True
        if address.is_site_local:
            return False
    return address.is_global and not address.is_multicast and not address.is_reserved


async def send(url: str, headers: dict[str, str], body: bytes, *, private: bool) -> None:
    """Posts a message; returns when the receiver has answered 2xx.

    Args:
        url: the receiver, as checked by the settings.
        headers: the headers beside those of every request.
        body: JSON.
        private: allow addresses outside the public internet.

    Raises:
        DeliveryError: the address is refused, the receiver cannot be reached in time, or its
            status is not 2xx.
    """
    parts = urlsplit(url)
    try:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            addresses = await _addresses(parts, private)
            status = await _post(parts, addresses, headers, body)
    except TimeoutError:
        raise DeliveryError(f"no answer within {TIMEOUT_SECONDS:.0f} s") from None
    except ssl.SSLError as error:
        reason = getattr(error, "verify_message", "") or error.reason or "no secure connection"
        raise DeliveryError(f"TLS: {reason}") from None
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise DeliveryError(f"the receiver cannot be reached: {reason}") from None
    if 300 <= status < 400:
        raise DeliveryError(f"the receiver answered {status}; redirects are not followed")
    if not 200 <= status < 300:
        raise DeliveryError(f"the receiver answered {status}")


def _port(parts: SplitResult) -> int:
    return parts.port or (443 if parts.scheme == "https" else 80)


async def _addresses(parts: SplitResult, private: bool) -> list[str]:
    """The addresses of the receiver, all of them checked."""
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(parts.hostname, _port(parts), type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError):
        raise DeliveryError("the receiver's name cannot be resolved") from None
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    if not private:
        for address in addresses:
            # Of a link-local address the zone is no part.
            if not is_public(ipaddress.ip_address(address.partition("%")[0])):
                raise DeliveryError(
                    "the address of the receiver is not on the public internet; "
                    "NCR_WEBHOOK_PRIVATE=true allows private addresses"
                )
    return addresses


async def _post(
    parts: SplitResult, addresses: list[str], headers: dict[str, str], body: bytes
) -> int:
    """Posts the message and returns the status of the answer."""
    reader, writer = await _connect(parts, addresses)
    try:
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        lines = [
            f"POST {path} HTTP/1.1",
            f"Host: {parts.netloc}",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
            "User-Agent: ncr-webhook",
            "Connection: close",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        writer.write("\r\n".join([*lines, "", ""]).encode("ascii") + body)
        await writer.drain()
        return await _status(reader)
    finally:
        writer.transport.abort()


async def _connect(
    parts: SplitResult, addresses: list[str]
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    secure = parts.scheme == "https"
    context = ssl.create_default_context() if secure else None
    name = parts.hostname if secure else None
    for address in addresses[:-1]:
        try:
            # One that does not respond leaves time for the others.
            async with asyncio.timeout(TIMEOUT_SECONDS / (2 * len(addresses))):
                return await asyncio.open_connection(
                    address, _port(parts), ssl=context, server_hostname=name
                )
        except OSError:  # a TimeoutError is one
            continue
    return await asyncio.open_connection(
        addresses[-1], _port(parts), ssl=context, server_hostname=name
    )


async def _status(reader: asyncio.StreamReader) -> int:
    """The final status, after any interim answers."""
    try:
        for _ in range(MAX_HEADERS):
            version, code, *_ = [*(await reader.readline()).split(None, 2), b"", b""]
            if not version.startswith(b"HTTP/1.") or not (len(code) == 3 and code.isdigit()):
                break
            if int(code) >= 200:
                return int(code)
            while (await reader.readline()).strip():
                pass
    except ValueError:  # a line longer than the reader's limit
        pass
    raise DeliveryError("the receiver's answer is not HTTP")
