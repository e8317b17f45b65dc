"""Who may see a page, and who may act: decisions about the headers of a request. Pure.

A page that another site opens under a name of its own (DNS rebinding) is refused by its Host. Whoever has the
token may read. Only the page itself may act: it has the cookie, and says where it comes from.
"""

import hmac
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass

COOKIE_AGE = 30 * 86_400  # seconds; the token is another one with each start


@dataclass(frozen=True, slots=True)
class Gate:
    """The token of a page at a port, and the host name it was told to be reached by, if any."""

    token: str
    port: int
    host_name: str = ""

    @property
    def cookie_name(self) -> str:
        """The name of the cookie: hosts share cookies over all their ports."""
        return f"ravnest_{self.port}"

    @property
    def cookie(self) -> str:
        """What a browser is told to keep."""
        rules = f"Path=/; Max-Age={COOKIE_AGE}; HttpOnly; SameSite=Strict"
        return f"{self.cookie_name}={self.token}; {rules}"

    def refuse_host(self, headers: Mapping[str, str]) -> str:
        """Return why a request is not for us; an address of numbers cannot be rebound by a name server."""
        name = _host_of(headers.get("host", ""))
        if name in {"localhost", self.host_name.lower()} - {""}:
            return ""
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return "this page does not go by that name; use the link that was printed"
        return ""

    def admits(self, headers: Mapping[str, str], cookies: Mapping[str, str], given: str = "") -> bool:
        """Return whether somebody may read: by the link, the cookie or the header Authorization."""
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        offered = [given, cookies.get(self.cookie_name, ""), bearer if scheme.lower() == "bearer" else ""]
        return any([self._is_token(each) for each in offered])  # noqa: C419 - all take the same time

    def refuse_action(self, headers: Mapping[str, str], cookies: Mapping[str, str]) -> str:
        """Return why somebody may not act."""
        if not self._is_token(cookies.get(self.cookie_name, "")):
            return "open the link that was printed first"
        origin, host = headers.get("origin", ""), headers.get("host", "")
        is_own_page = origin in (f"http://{host}", f"https://{host}")
        if not host or not is_own_page or headers.get("sec-fetch-site", "same-origin") != "same-origin":
            return "only the page itself may do this"
        return ""

    def _is_token(self, offered: str) -> bool:
        return hmac.compare_digest(offered.encode(), self.token.encode())


def _host_of(header: str) -> str:
    """Return the host of a Host header, without its port."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.partition(":")[0].lower()


HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
