"""Flags of `specdec serve`."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from commands.options.shared import ReceiptIds
from commands.output.help import SERVER, option
from commands.output.output import check_output_file, check_readable
from runtime.text.call_formats import named_reasoning_format, named_tool_format
from runtime.util.errors import UsageError
from runtime.util.files import check_regular

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@]+|null")  # as browsers write it: RFC 6454, section 6.2


@dataclass(frozen=True)
class ServerOptions:
    """Address, access and time limits of the server."""

    host: Annotated[str, option(SERVER, "Address to listen on; 0.0.0.0 for all interfaces.")] = "127.0.0.1"
    port: Annotated[int, option(SERVER, "Port to listen on; 0 for any free port.", min=0, max=65535)] = 8000
    api_key: Annotated[
        str | None,
        option(
            SERVER,
            "Key that clients must send, or several, separated by commas, one for each client. Other users can see a "
            "command's flags: set it in the environment.",
            shown="none is asked for",
            envvar="SPECDEC_API_KEY",
        ),
    ] = None
    ssl_certfile: Annotated[
        Path | None, option(SERVER, "Certificate for TLS, with its chain (PEM).", shown="no TLS")
    ] = None
    ssl_keyfile: Annotated[
        Path | None, option(SERVER, "Private key of the certificate (PEM).", shown="in the certificate's file")
    ] = None
    served_model_name: Annotated[
        list[str] | None,
        option(
            SERVER,
            "Name of the model for clients; repeatable, the first appears in answers.",
            shown="the directory's name",
        ),
    ] = None
    any_model: Annotated[
        bool,
        option(SERVER, "Answer requests for any model's name with this model, instead of 404.", "--any-model"),
    ] = False
    log_requests: Annotated[
        bool,
        option(
            SERVER,
            "Print a line for each request on stderr: route, model, tokens, seconds, status; never any text.",
            "--log-requests",
        ),
    ] = False
    max_queue_len: Annotated[
        int, option(SERVER, "Most requests that may wait; a further request gets a 503.", min=0)
    ] = 128
    max_requests_per_client: Annotated[
        int | None,
        option(
            SERVER,
            "Most requests that one client may have running or waiting; a further request gets a 429.",
            shown="no limit",
            min=1,
        ),
    ] = None
    max_gap_ms: Annotated[
        float,
        option(
            SERVER,
            "Longest time between two tokens of a running answer while other requests' prompts are computed, in "
            "ms, but at least 2.5 steps.",
            min=0.0,
            metavar="MS",
        ),
    ] = 30.0
    request_timeout: Annotated[
        float, option(SERVER, "Time limit for an answer, waiting included, in seconds.", min=0.001, metavar="S")
    ] = 600.0
    shutdown_timeout: Annotated[
        float,
        option(
            SERVER,
            "Time for running answers to finish after SIGTERM or Ctrl-C, in seconds.",
            min=0.0,
            metavar="S",
        ),
    ] = 30.0
    tool_call_parser: Annotated[
        str | None,
        option(
            SERVER,
            "Format in which the model calls tools: hermes, llama3_json, mistral, ...; none reads no calls.",
            shown="the chat template's",
            check=named_tool_format,
            metavar="FORMAT",
        ),
    ] = None
    reasoning_parser: Annotated[
        str | None,
        option(
            SERVER,
            "Format of the model's reasoning before the answer: think, mistral, gemma4, gpt_oss; none: it is text.",
            shown="the chat template's",
            check=named_reasoning_format,
            metavar="FORMAT",
        ),
    ] = None
    thinking_token_budget: Annotated[
        int | None,
        option(
            SERVER,
            "Default of requests: most tokens that the model thinks in an output; 0 ends its thinking at once.",
            shown="no limit",
            min=0,
        ),
    ] = None
    refuse_special_tokens: Annotated[
        bool,
        option(
            SERVER,
            "Answer 400 to a message whose text has a special token, such as <|im_end|>.",
            "--refuse-special-tokens",
        ),
    ] = False
    warm: Annotated[
        Path | None,
        option(
            SERVER,
            "Prompts to compute, or to find on disk, before the server listens: JSON lines, each the body of a "
            "request.",
            shown="none",
            metavar="FILE.jsonl",
        ),
    ] = None
    corpus: Annotated[
        list[str] | None,
        option(
            SERVER,
            "Corpus of `specdec corpus create` that every client's requests may name; repeatable.",
            shown="none",
            metavar="NAME=FILE",
        ),
    ] = None
    receipts: Annotated[
        Path | None,
        option(
            SERVER,
            "Append a receipt of each answer to a file: all that its tokens follow from, for `specdec check`.",
            metavar="FILE.jsonl",
        ),
    ] = None
    receipt_ids: ReceiptIds = None
    allowed_origins: Annotated[
        list[str] | None,
        option(
            SERVER,
            "Origin whose pages may send requests, such as https://chat.example.org; `*` is any; repeatable.",
            shown="the server's own page",
        ),
    ] = None

    @property
    def corpora(self) -> dict[str, Path]:
        """Files of corpora by their names; UsageError for a flag that is not `NAME=FILE`, or for a name that is given
        twice.
        """
        found: dict[str, Path] = {}
        for given in self.corpus or []:
            name, sign, path = given.partition("=")
            if not (name and sign and path) or name in found:
                what = "names a corpus twice" if name in found else "is not of the form NAME=FILE"
                raise UsageError(f"`--corpus` {what}: {given}", hint="`--corpus manual=manual.corpus` is an example")
            found[name] = Path(path)
        return found

    def check(self) -> None:
        """UsageError for a certificate that cannot be used, for `--receipt-ids` without `--receipts`, for a key that no
        HTTP header can carry, and for an origin that no browser sends (the last two would lock everyone out).
        SpecDecError for a file that cannot be read or written.
        """
        self._check_certificate()
        if self.warm is not None:
            check_readable([self.warm])
        check_readable(list(self.corpora.values()))
        if self.receipts is not None:
            check_output_file(self.receipts)
        elif self.receipt_ids is not None:
            raise UsageError(f"`--receipt-ids` is for receipts: {self.receipt_ids}", hint="give `--receipts` too")
        keys = "key" if self.api_key is None else self.api_key
        for key in keys.split(","):
            if not (key.strip() and key.isascii() and key.isprintable()) or keys != keys.strip():
                raise UsageError(
                    "an API key has characters that an HTTP header cannot hold", hint="take letters and digits"
                )
        for origin in self.allowed_origins or []:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise UsageError(
                    f"`--allowed-origins` is not an origin: {origin}",
                    hint="a scheme, a host and perhaps a port, without a path: https://chat.example.org:8000",
                )

    def _check_certificate(self) -> None:
        """UsageError for certificate files that cannot be used, SpecDecError for a path that is no file."""
        if self.ssl_certfile is None:
            if self.ssl_keyfile is not None:
                raise UsageError("`--ssl-keyfile` is given without a certificate", hint="name it by `--ssl-certfile`")
            return
        import ssl

        key = self.ssl_keyfile or self.ssl_certfile
        for path in (self.ssl_certfile, key):
            check_regular(path)
        try:
            # A password would be asked for in the terminal.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.ssl_certfile, self.ssl_keyfile, lambda: "")
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
            raise UsageError(
                f"no certificate and key for TLS ({reason}): {self.ssl_certfile}, {key}",
                hint="both are PEM files, the key without a password"
                + ("; if the key is in another file, `--ssl-keyfile` names it" if self.ssl_keyfile is None else ""),
            ) from None
