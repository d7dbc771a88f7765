"""`pdmesh rules …`: the gateway's own commands, found by name.

Shared code does not know the services: the gateway is imported when it is asked for.
"""

import importlib

import typer

# The gateway parses all arguments, `--help` included.
CONTEXT_SETTINGS = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": [],
}


def rules(context: typer.Context) -> None:
    """Check, explain and compile parameter rules."""
    command = typer.main.get_command(importlib.import_module("gateway.rules.cli").app)
    command.main(context.args, prog_name="pdmesh rules")
