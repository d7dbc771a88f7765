"""`pdmesh key …`: the gateway's own commands, found by name.

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


def key(context: typer.Context) -> None:
    """Make, list and revoke API keys."""
    command = typer.main.get_command(importlib.import_module("gateway.keys.cli").app)
    command.main(context.args, prog_name="pdmesh key")
