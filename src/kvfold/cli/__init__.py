"""The command line: one file a command. Heavy imports happen inside the commands, so that help is instant."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from kvfold.cli.ask import ask as ask_command
from kvfold.cli.bench import app as bench_app
from kvfold.cli.calibrate import calibrate as calibrate_command
from kvfold.cli.chat import chat as chat_command
from kvfold.cli.console import Commands
from kvfold.cli.demo import demo as demo_command
from kvfold.cli.doctor import doctor as doctor_command
from kvfold.cli.eval import eval_ as eval_command
from kvfold.cli.fold import fold as fold_command
from kvfold.cli.inspect import inspect as inspect_command
from kvfold.cli.methods import methods as methods_command
from kvfold.cli.report import report as report_command
from kvfold.cli.store import store as store_commands
from kvfold.cli.train_gates import train_gates as train_gates_command

app = typer.Typer(
    cls=Commands,
    name="kvfold",
    help="Fold the key-value cache of a long document to a few percent of its size, then ask it questions.",
    epilog="Example: kvfold fold report.txt --model demo --keep 0.1 -o report.kvf && "
    'kvfold ask report.kvf "Who wrote it?"',
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from kvfold import __version__

        typer.echo(f"kvfold {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback when something fails.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    context.obj = {"debug": debug}


for _command, _example in (
    (fold_command, "report.txt --model demo --method rdkv --keep 0.1 -o report.kvf"),
    (ask_command, 'report.kvf "Who wrote it?" "When?" --json'),
    (chat_command, "report.kvf"),
    (inspect_command, "report.kvf --png heat.png"),
    (methods_command, "--json"),
    (calibrate_command, "blockgtq demo --text novel.txt -o energies.safetensors"),
    (train_gates_command, "demo --text novel.txt --budget 128 -o gates.safetensors"),
    (report_command, "results/ -o report.html"),
    (eval_command, "-m demo --method rdkv --method snapkv:bits=4 --keep 0.25,0.1 --task needle -o results"),
    (doctor_command, ""),
    (demo_command, "--keep 0.1"),
):
    _name = _command.__name__.rstrip("_").replace("_", "-")
    app.command(_name, epilog=f"Example: kvfold {_name} {_example}".rstrip())(_command)

app.add_typer(bench_app)

app.add_typer(store_commands)


def main() -> None:
    """Entry point of the `kvfold` command."""
    # Before torch starts its threads: on a machine that does other work too, threads that spin while they wait for
    # each other cost most of the time (measured with every core busy: 0.3 against 6.5 tokens/s).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    app()
