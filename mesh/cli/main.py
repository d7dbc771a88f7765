"""The `pdmesh` command."""

import typer

from mesh.cli import bench, calc, doctor, down, gate, model, rules, status, top, trace, up

app = typer.Typer(
    name="pdmesh",
    help="LLM inference as a mesh of gRPC services.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command("up")(up.up)
app.command("down")(down.down)
app.command("status")(status.status)
app.command("rules", context_settings=rules.PASS_ALL)(rules.rules)
app.add_typer(model.app, name="model")
app.command("trace")(trace.trace)
app.command("top")(top.top)
app.command("doctor")(doctor.doctor)
app.command("bench")(bench.bench)
app.command("gate", context_settings=gate.CONTEXT_SETTINGS)(gate.gate)
app.command("calc")(calc.calc)

if __name__ == "__main__":
    app()
