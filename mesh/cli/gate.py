"""`pdmesh gate`: judge a numeric configuration, in a process of its own."""

import os
import sys

import typer

# Options belong to the gate: this package must not load an engine to know them.
CONTEXT_SETTINGS = {
    "ignore_unknown_options": True,
    "allow_extra_args": True,
    "help_option_names": [],
}


def gate(context: typer.Context) -> None:
    """Judge a numeric configuration: six questions, and closeness to the reference."""
    os.execv(sys.executable, [sys.executable, "-m", "quality", *context.args])
