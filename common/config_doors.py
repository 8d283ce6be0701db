"""The gateway's part of the config tree, and what says how the cluster's processes know each other."""

from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

import pydantic
from pydantic import Field

from common.config_node import Count, Node, Port, Positive, Price, Seconds
from common.hosts import is_loopback


class TlsConfig(Node):
    """A certificate, and whom it trusts. The files are read again when they have changed."""

    cert_file: Path | None = None
    """PEM: the certificate, then those of the authorities between it and the root. None: nothing is encrypted."""
    key_file: Path | None = None
    """PEM: its private key."""
    ca_file: Path | None = None
    """PEM: authorities, one of which must have certified the other side; None: clients need no certificate."""

    @property
    def is_on(self) -> bool:
        """Whether connections are encrypted."""
        return self.cert_file is not None

    @pydantic.model_validator(mode="after")
    def _is_whole(self) -> "TlsConfig":
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("cert_file and key_file go together")
        if self.cert_file is None and self.ca_file is not None:
            raise ValueError("ca_file is of no use without cert_file and key_file")
        return self


class SecurityConfig(Node):
    """How the cluster's processes know each other. What clients show is the gateway's business."""

    tls: TlsConfig = TlsConfig()
    """Encrypts calls between router, workers and gateways; wants `ca_file`. All may have one certificate."""
    tls_name: str = "baton.internal"
    """The name (DNS) that the certificates of these processes are for; their hosts' names do not matter."""
    secret_file: Path | None = None
    """Holds the secret that calls between router, workers and gateways carry; None: `baton serve` makes one for its
    life and hands it to the processes that it starts."""

    @pydantic.model_validator(mode="after")
    def _is_mutual(self) -> "SecurityConfig":
        if self.tls.is_on and self.tls.ca_file is None:
            raise ValueError("tls.ca_file is missing: the cluster's processes must know each other's authority")
        return self


class RequestLimitsConfig(Node):
    """What one request may hold, by whichever API it comes. One that holds more is refused, with both numbers."""

    messages_max: Annotated[int, Field(gt=0, le=4096)] = 4096
    """Messages of a chat."""
    stop_strings_max: Annotated[int, Field(gt=0, le=16)] = 16
    """Stop strings."""
    logit_bias_max: Annotated[int, Field(gt=0, le=1024)] = 1024
    """Entries of logit_bias."""
    tools_max: Annotated[int, Field(gt=0, le=1024)] = 128
    """Tools that a chat may offer."""
    schema_bytes_max: Positive = 64 * 1024
    """A JSON schema, regular expression or grammar, of the answer or of one tool's parameters; as UTF-8."""
    schema_depth_max: Annotated[int, Field(gt=0, le=256)] = 32
    """How deep a JSON schema's objects and lists may be nested."""


class PricesConfig(Node):
    """What clients are told that their requests cost. All 0: nothing is said."""

    currency: Annotated[str, Field(min_length=1, max_length=16)] = "USD"
    """What the prices are in."""
    prompt_tokens: Price = 0.0
    """Of a million prompt tokens that were computed."""
    cached_tokens: Price = 0.0
    """Of a million prompt tokens that were found in a cache."""
    output_tokens: Price = 0.0
    """Of a million output tokens."""
    device_hours: Price = 0.0
    """Of an hour of a worker's device; a request has its share of each step."""

    @property
    def are_set(self) -> bool:
        """Whether anything costs anything."""
        return any((self.prompt_tokens, self.cached_tokens, self.output_tokens, self.device_hours))


class HttpConfig(Node):
    """Limits of the OpenAI API. Where it listens is the gateway's host and http_port."""

    body_bytes_max: Positive = 4 * 1024 * 1024
    """Largest body of a request; a larger one is answered with 413. All streams wait while one is read: 10 ms for so
    much text."""
    body_values_max: Positive = 256 * 1024
    """Most values of a body above 64 KiB: token ids, and whatever else is an item of a list or a member of an object;
    lists and objects themselves count as 8. All streams wait while they are read, 0.1 s for so many. Raise it for
    longer prompts of token ids."""
    head_bytes_max: Positive = 64 * 1024
    """Largest request line and headers together."""
    arrival_s: Seconds = 30.0
    """How long a client may take to send a request's head, and its body after that; over gRPC its message."""
    keepalive_s: Seconds = 10.0
    """A stream that has had nothing to send for so long gets a comment, so that proxies do not cut it."""
    unread_s: Seconds = 30.0
    """A client that takes no bytes for so long is cut off and its request ended. Over gRPC: that takes no message."""
    idle_s: Seconds = 75.0
    """How long a connection may stay open between two requests."""
    connections_max: Positive = 16_384
    """Most connections. A new one beyond it takes the place of the oldest that has asked for nothing, or has nothing
    under way; where all have, its request is answered with 503. When three quarters have a request under way, each
    tenant (where none is known, each address) may have its equal share of them and no more."""
    cors_origins: tuple[str, ...] = ()
    """Origins (`https://host:port`) whose pages browsers may let use the API; `*`: all, so any page that somebody here
    opens may use it. None: no page from elsewhere."""
    choices_max: Positive = 128
    """Most choices of one request: its prompts times n. Also of one gRPC call."""


class GatewayConfig(Node):
    """The clients' door."""

    count: Positive = 1
    """Gateways, all on the node of `baton serve`, each with a process and so a core of its own. Each listens one port
    further than the one before. Limits of requests and tenants are each gateway's own."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    grpc_port: Port = 50051
    """Port of the gRPC API; 0: any free one."""
    http_port: Port = 8000
    """Port of the OpenAI API; 0: any free one."""
    running_max: Positive = 4096
    """Most requests at once, those that wait at the router included: what the gateway's memory bears. More than
    router.queue_max, so that it is the router that decides who is refused."""
    message_bytes_max: Positive = 4 * 1024 * 1024
    """Largest gRPC message. All streams wait while one is read: 20 ms for so many token ids."""
    message_fields_max: Positive = 32 * 1024
    """Most fields of a gRPC message above 64 KiB, those of the messages in it included; a list of numbers is one."""
    prompt_tokens_max: Positive | None = None
    """Longest prompt; None: the context window alone limits it."""
    tls: TlsConfig = TlsConfig()
    """Encrypts both APIs. With `ca_file`, clients need a certificate."""
    keys_file: Path | None = None
    """API keys and tenants (`baton key new` makes it); read again when it changes. None: nobody is asked for a key."""
    allow_anonymous: bool = False
    """Serve without keys also on an address that others than this machine can reach."""
    router_wait_s: Seconds = 5.0
    """How long a request waits for a router that is away, before it is answered with UNAVAILABLE."""
    retries_max: Count = 2
    """How often a request is placed anew after its worker failed."""
    unread_tokens_max: Positive = 4096
    """Tokens of one request that wait for a client that does not read; beyond it the request is ended."""
    metadata_bytes_max: Positive = 16 * 1024
    """Largest headers of a gRPC call, all together."""
    calls_max: Positive = 16_384
    """Most gRPC calls at once, of all kinds; beyond it a call is refused with RESOURCE_EXHAUSTED. When three quarters
    are open, each tenant (where none is known, each address) may have its equal share and no more."""
    arriving_max: Positive = 64
    """Of one tenant (where none is known, one address): messages, and bodies above 64 KiB, that arrive and are read at
    once. Further ones wait for those; each may take memory for its largest size."""
    streams_max: Positive = 256
    """Of one tenant, as above: gRPC calls that carry many requests, as Triton's streams do."""
    grpc_connections_max: Positive = 16_384
    """Most gRPC connections; a further one is closed at once."""
    idle_s: Seconds = 300.0
    """How long a gRPC connection may stay open without a call; clients open the next one by themselves."""
    request_s: Seconds = 3600.0
    """Longest life of a request; a client's own deadline may only be shorter."""
    token_wait_s: Seconds = 1800.0
    """Longest wait for a request's next token, or for its first; then it ends with DEADLINE_EXCEEDED. Ample: a call
    that is quiet for ten minutes, behind a long prompt, is still one to be answered."""
    tool_format: Literal["auto", "hermes", "llama3", "mistral"] = "auto"
    """How the model writes tool calls; `auto`: by its chat template, `hermes` where that tells nothing."""
    reasoning: Literal["auto", "think", "none"] = "auto"
    """Whether answers may begin with `<think>...</think>`, which is told apart; `auto`: by the chat template."""
    log_texts_max: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Characters of each prompt and of each answer that go to the gateway's log (level INFO), with the request's id.
    0: what clients ask and are answered is in no log of any process."""
    request: RequestLimitsConfig = RequestLimitsConfig()
    """What one request may hold."""
    prices: PricesConfig = PricesConfig()
    """What requests cost."""
    http: HttpConfig = HttpConfig()
    """Limits of the OpenAI API."""

    @pydantic.model_validator(mode="after")
    def _has_room(self) -> "GatewayConfig":
        firsts = sorted(port for port in (self.grpc_port, self.http_port) if port)
        for first, following in pairwise([*firsts, 65_536]):
            if first + self.count > following:
                raise ValueError(
                    f"each of {self.count} gateways takes a port from {first} on, and {following} is not free"
                )
        return self

    def of(self, number: int) -> "GatewayConfig":
        """Return the config of the gateway with this number, counted from 0."""
        ports = {"grpc_port": self.grpc_port, "http_port": self.http_port}
        return self.model_copy(update={name: port and port + number for name, port in ports.items()})

    @pydantic.model_validator(mode="after")
    def _is_safe(self) -> "GatewayConfig":
        if self.keys_file is None and not self.allow_anonymous and not is_loopback(self.host):
            raise ValueError(
                f"host {self.host} can be reached from elsewhere, and no key would be asked for: set gateway.keys_file "
                "(`baton key new` makes one), or gateway.allow_anonymous=true to serve whoever comes"
            )
        return self
