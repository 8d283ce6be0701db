"""The command line, `baton`. Declares commands and options; what they do is in cluster/commands and imported on use."""

import importlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from common import config_file as configuration
from common.errors import BatonError, ConfigError

if TYPE_CHECKING:
    from cluster.client import Client
    from cluster.model_store import ModelFolder

app = typer.Typer(
    name="baton",
    help="A disaggregated prefill/decode serving cluster for large language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
key_app = typer.Typer(help="API keys and their tenants.", no_args_is_help=True, pretty_exceptions_enable=False)
app.add_typer(key_app, name="key")
model_app = typer.Typer(help="Models that can be served.", no_args_is_help=True, pretty_exceptions_enable=False)
app.add_typer(model_app, name="model")

_EXTENSIONS = (
    "loadtest.cli",
    "loadtest.bench.cli",
)  # each has an `app` whose commands join ours; imported by name, never the other way

ConfigFile = Annotated[
    Path | None, typer.Option("-c", "--config", help="YAML file; see common/config.py and config_doors.py beside it.")
]
Settings = Annotated[list[str], typer.Option("--set", metavar="A.B=C", help="Override one setting; repeatable.")]
Address = Annotated[str, typer.Option("--addr", metavar="HOST:PORT", help="The gateway's gRPC address.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
ApiKey = Annotated[Path | None, typer.Option("--key-file", metavar="FILE", help="Holds the API key to show.")]
Authority = Annotated[
    Path | None, typer.Option("--ca", help="PEM of the authority that certified the gateway; without it: no TLS.")
]
KeysFile = Annotated[Path, typer.Option("--file", help="The file of keys and tenants: gateway.keys_file.")]
System = Annotated[str | None, typer.Option(help="System message.")]
MaxTokens = Annotated[int | None, typer.Option(min=0, help="Most tokens to generate.")]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy; default: the cluster's, 1.")]
Seed = Annotated[int | None, typer.Option(min=0, help="Makes sampling repeatable.")]

_DEFAULT_ADDRESS = "127.0.0.1:50051"
_KEYS_FILE = Path("~/.config/baton/keys.yaml")


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Show an operating error as one line on standard error and end the program: 2 for set-up errors, 1 for others."""
    try:
        yield
    except BatonError as error:
        sys.stderr.write(f"baton: {' '.join(error.message.split())}\n")
        raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from error
    except KeyboardInterrupt as error:
        raise typer.Exit(130) from error


def client_of(addr: str, key_file: Path | None, ca: Path | None) -> "Client":
    """Return a client of the gateway at an address.

    Raises:
        ConfigError: the address is none, or a file cannot be read.
    """
    from cluster.client import Client

    try:
        key = None if key_file is None else key_file.expanduser().read_text("ascii").strip()
        authority = None if ca is None else ca.expanduser().read_bytes()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read --key-file or --ca: {error}") from error
    return Client(addr, key, authority)


@app.command()
def serve(
    config: ConfigFile = None,
    settings: Settings = [],  # noqa: B006 - typer copies it
    ready_file: Annotated[
        Path | None, typer.Option(help="Written with the addresses as JSON when ready, kept up to date.")
    ] = None,
) -> None:
    """Start a cluster and serve until Ctrl-C."""
    with one_line_errors():
        tree = configuration.load(config, settings)
        from cluster.commands.report import Report
        from cluster.commands.serve import serve as run

        with Report() as report:
            run(tree, ready_file, report)


@app.command()
def generate(
    prompt: str,
    addr: Address = _DEFAULT_ADDRESS,
    system: System = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    seed: Seed = None,
    stop: Annotated[list[str], typer.Option(help="Text that ends the answer; repeatable.")] = [],  # noqa: B006
    raw: Annotated[bool, typer.Option("--raw", help="Complete PROMPT as it is: no chat template.")] = False,
    as_json: AsJson = False,
    key_file: ApiKey = None,
    ca: Authority = None,
) -> None:
    """Send PROMPT to a cluster and print the answer as it comes."""
    with one_line_errors():
        if raw and system is not None:
            raise ConfigError("--system has no meaning with --raw: there is no chat template to put it in")
        from cluster.commands import ask

        ask.generate(
            client_of(addr, key_file, ca),
            prompt,
            system,
            ask.sampling(max_tokens, temperature, seed, stop),
            raw,
            as_json,
        )


@app.command()
def chat(
    addr: Address = _DEFAULT_ADDRESS,
    system: System = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    seed: Seed = None,
    key_file: ApiKey = None,
    ca: Authority = None,
) -> None:
    """Converse with a cluster; it is sent the whole conversation at each turn."""
    with one_line_errors():
        from cluster.commands import ask

        ask.chat(client_of(addr, key_file, ca), system, ask.sampling(max_tokens, temperature, seed, []))


@app.command()
def status(
    addr: Address = _DEFAULT_ADDRESS, as_json: AsJson = False, key_file: ApiKey = None, ca: Authority = None
) -> None:
    """Show workers, router, gateway and model of a cluster."""
    with one_line_errors():
        from rich.console import Console

        from cluster.commands import show

        with client_of(addr, key_file, ca) as client:
            state = show.status_json(client.status())
        if as_json:
            sys.stdout.write(json.dumps(state) + "\n")
        else:
            show.print_status(Console(width=None if sys.stdout.isatty() else 140, highlight=False), state)


@app.command()
def explain(
    request_id: Annotated[str, typer.Argument(help="As the answer and every log line name it.")],
    addr: Address = _DEFAULT_ADDRESS,
    as_json: AsJson = False,
    key_file: ApiKey = None,
    ca: Authority = None,
) -> None:
    """Show why a request went where it did: what was weighed, what each would have cost, what was chosen."""
    with one_line_errors():
        from cluster.commands.explain import explain as run

        run(client_of(addr, key_file, ca), request_id, as_json)


@app.command()
def demo(
    addr: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="A running cluster; default: start one.")
    ] = None,
    config: ConfigFile = None,
    settings: Settings = [],  # noqa: B006
) -> None:
    """Start a cluster on free ports, ask three questions, show where the time went, stop it."""
    with one_line_errors():
        from cluster.commands import ask

        if addr is not None:
            ask.demo(addr)
            return
        from cluster.testing import RunningCluster

        quiet = [] if config is not None else ["log_level=WARNING"]  # between the answers, the log is in the way
        with RunningCluster(*quiet, *settings, config=config, echo=True, start_timeout_s=900.0) as cluster:
            ask.demo(cluster.address)


@app.command()
def nodes(
    address: Annotated[
        str, typer.Option(help="HOST:PORT of the Ray cluster's head; auto on one of its nodes.")
    ] = "auto",
    expect: Annotated[str, typer.Option(metavar="IP,IP", help="Nodes that should have joined.")] = "",
) -> None:
    """List the hosts of a Ray cluster, and those that have not joined."""
    with one_line_errors():
        from cluster.commands.nodes import nodes as run

        run(address, [host for host in expect.split(",") if host])


@model_app.command("pull")
def model_pull(
    source: Annotated[str | None, typer.Argument(help="As for model.source; default: the configured one.")] = None,
    config: ConfigFile = None,
    settings: Settings = [],  # noqa: B006
    as_json: AsJson = False,
) -> None:
    """Fetch and convert a model, so that `serve` finds it ready."""
    with one_line_errors():
        node = configuration.load(config, settings).model
        if source is not None:
            node = node.model_copy(update={"source": source})
        from cluster import model_store
        from cluster.commands.report import Report

        with Report() as report:
            folder = model_store.resolve(node, report.model_progress)
        sys.stdout.write(f"{json.dumps(_model_json(folder)) if as_json else folder.path}\n")


@model_app.command("list")
def model_list(config: ConfigFile = None, settings: Settings = [], as_json: AsJson = False) -> None:  # noqa: B006
    """List the models in the cache."""
    with one_line_errors():
        from cluster import model_store

        folders = model_store.cached_models(configuration.load(config, settings).model.cache_dir)
        if as_json:
            sys.stdout.write(json.dumps([_model_json(folder) for folder in folders]) + "\n")
            return
        for folder in folders:
            sys.stdout.write(f"{folder.model_id}\t{folder.format}\t{folder.path}\n")


@key_app.command("new")
def key_new(
    tenant: Annotated[str, typer.Option(help="Whose key it is; a new name is a new tenant.")],
    file: KeysFile = _KEYS_FILE,
    admin: Annotated[bool, typer.Option("--admin", help="May also see the cluster's state.")] = False,
    rules: Annotated[
        list[str], typer.Option("--rule", metavar="NAME=VALUE", help="Change a rule of the tenant's; repeatable.")
    ] = [],  # noqa: B006
) -> None:
    """Make an API key and print it, once: the file keeps only its hash."""
    with one_line_errors():
        from cluster.commands import keys

        keys.new(file.expanduser(), tenant, admin, rules)


@key_app.command("list")
def key_list(file: KeysFile = _KEYS_FILE, as_json: AsJson = False) -> None:
    """List keys by their ids, and their tenants' rules."""
    with one_line_errors():
        from cluster.commands import keys

        keys.show(file.expanduser(), as_json)


@key_app.command("revoke")
def key_revoke(key_id: str, file: KeysFile = _KEYS_FILE) -> None:
    """Take a key out of the file; gateways refuse it within a second."""
    with one_line_errors():
        from cluster.tenants.key_file import remove_key

        remove_key(file.expanduser(), key_id)


def _model_json(folder: "ModelFolder") -> dict[str, str | None]:
    return {
        "name": folder.model_id,
        "path": str(folder.path),
        "source": folder.source,
        "format": folder.format,
        "gguf": None if folder.gguf is None else str(folder.gguf),
    }


def _add_extensions() -> None:
    """Add the commands of other packages, unless one of ours was asked for: those start without them."""
    ours = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    if {group.name for group in app.registered_groups} | ours >= {*sys.argv[1:2]} != set():
        return
    for name in _EXTENSIONS:
        package = name.rpartition(".")[0]
        if importlib.util.find_spec(package) is not None and importlib.util.find_spec(name) is not None:
            app.add_typer(importlib.import_module(name).app)


def main() -> None:
    """Entry of the console script."""
    _add_extensions()
    app()


if __name__ == "__main__":
    main()
