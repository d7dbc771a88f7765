"""`python -m quality`, which is `pdmesh gate`."""

from quality.cli import app

if __name__ == "__main__":
    app(prog_name="pdmesh gate")
