"""The `pdmesh` command."""

import os
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

# What commands start is another program at once. gRPC must not follow it into the fork, where it
# starts threads of its own that may end the child; it reads this when it is imported.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# Where each command is: a function, or a Typer with commands of its own.
COMMANDS = {
    "up": "mesh.cli.up:up",
    "down": "mesh.cli.down:down",
    "status": "mesh.cli.status:status",
    "drain": "mesh.cli.workers:drain",
    "scale": "mesh.cli.workers:scale",
    "key": "mesh.cli.key:key",
    "rules": "mesh.cli.rules:rules",
    "model": "mesh.cli.model:app",
    "trace": "mesh.cli.trace:trace",
    "top": "mesh.cli.top:top",
    "doctor": "mesh.cli.doctor:doctor",
    "bench": "mesh.cli.bench:bench",
    "gate": "mesh.cli.gate:gate",
    "calc": "mesh.cli.calc:calc",
}


class _LazyCommands(TyperGroup):
    """Imports a command when it is asked for: most need little of what the others need.

    What Typer's contexts and commands are is private to it.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        module_name, _, attribute = COMMANDS[cmd_name].partition(":")
        module = import_module(module_name)
        found = getattr(module, attribute)
        if isinstance(found, typer.Typer):
            group = typer.main.get_group(found)
            group.name = cmd_name
            return group
        single = typer.Typer(add_completion=False)
        single.command(cmd_name, context_settings=getattr(module, "CONTEXT_SETTINGS", None))(found)
        return typer.main.get_command(single)


app = typer.Typer(
    name="pdmesh", cls=_LazyCommands, no_args_is_help=True, pretty_exceptions_enable=False
)


@app.callback()
def pdmesh() -> None:
    """LLM inference as a mesh of gRPC services."""


if __name__ == "__main__":
    app()
