"""The page at `/`: one file, served with a policy that runs nothing but what is in it."""

import base64
import hashlib
import re
from importlib.resources import files

from fastapi.responses import HTMLResponse

_INLINE = re.compile(r"<(script|style)[^>]*>(.*?)</\1>", re.DOTALL | re.IGNORECASE)


def page_response() -> HTMLResponse:
    """The page, its own scripts and styles allowed by their digests."""
    html = (files("commands.serving") / "page.html").read_text(encoding="utf-8")
    digests: dict[str, list[str]] = {"script": [], "style": []}
    for kind, content in _INLINE.findall(html):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        digests[kind.lower()].append(f"'sha256-{digest}'")
    policy = "; ".join(
        [
            "default-src 'none'",
            f"script-src {' '.join(digests['script'])}",
            f"style-src {' '.join(digests['style'])}",
            "connect-src 'self'",
            "img-src 'self' data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        ]
    )
    headers = {"Content-Security-Policy": policy, "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache"}
    return HTMLResponse(html, headers=headers | {"X-Content-Type-Options": "nosniff"})
