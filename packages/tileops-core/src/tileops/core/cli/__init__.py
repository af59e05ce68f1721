"""The ``tileops`` command.

Each command is a click command named ``command`` in a module of its own, imported when it is asked for: help needs no
other command, and no torch. Exit codes: 0 fine, 1 failed, 2 a wrong command line, 3 something is missing here.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import click

from tileops.core.errors import BackendError, TileOpsError

FAILED, USAGE, ENVIRONMENT = 1, 2, 3
INTERRUPTED, BROKEN_PIPE = 130, 141  # as a shell reports SIGINT and SIGPIPE

# name: (module, line of help)
COMMANDS = {
    "list": ("listing", "List the installed operators."),
    "show": ("show", "Explain an operator: signature, semantics, workloads and their bounds."),
    "run": ("run", "Run an operator's workloads here: verified, timed, against their bound."),
    "demo": ("demo", "Run every installed operator, scaled to what a CPU can do."),
    "check": ("check", "Check specs: language, references, classes, tests, rows and rooflines."),
    "cache": ("cache", "Show, build or clear the compiled programs."),
    "tune": ("tune", "Choose kernels and configs for rows on this machine's GPUs."),
    "bench": ("bench", "Measure rows against their rivals."),
    "calibrate": ("calibrate", "Measure what this board reaches, for its profile."),
    "report": ("report", "Turn result documents into a page, or compare two."),
    "doctor": ("doctor", "Say what is here, what is missing, and the mend."),
}


class _Missing(click.ClickException):
    exit_code = ENVIRONMENT


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> Any:
        return [*COMMANDS]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"{__name__}.{COMMANDS[name][0]}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, help) for name, (_, help) in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BackendError as e:
            raise _Missing(str(e)) from None
        except TileOpsError as e:
            raise click.ClickException(str(e)) from None
        except ModuleNotFoundError as e:
            if e.name != "torch":
                raise
            raise _Missing("PyTorch is not installed; pip install torch") from None
        except KeyboardInterrupt:
            ctx.exit(INTERRUPTED)
        except BrokenPipeError:
            # The interpreter flushes stdout once more when it exits.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ctx.exit(BROKEN_PIPE)
        except OSError as e:
            raise click.ClickException(str(e)) from None


def _print_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        from tileops.core.cli.output import version

        click.echo(f"tileops {version('tileops-core') or '(from a source tree)'}")
        ctx.exit()


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Show it.")
def main() -> None:
    """Operators for GPUs that start as specs: what is installed, what it means, and whether it is right here."""
