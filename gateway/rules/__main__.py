"""`python -m gateway.rules`, which is `pdmesh rules`."""

from gateway.rules.cli import app

if __name__ == "__main__":
    app(prog_name="pdmesh rules")
