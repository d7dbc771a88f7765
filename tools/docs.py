"""Write the tables of docs/ that come from the code, or check that they are up to date."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import telemetry_docs

from decode_svc.config import DecodeConfig
from gateway.config import GatewayConfig
from kv_transfer_svc.config import KvTransferConfig
from mesh.config import ServiceConfig, Setting, describe
from prefill_svc.config import PrefillConfig
from scheduler_svc.config import SchedulerConfig
from tokenizer_svc.config import TokenizerConfig
from worker.config import WorkerConfig

DOCS = Path(__file__).resolve().parent.parent / "docs"
SECTIONS: dict[str, type[ServiceConfig]] = {
    "Every service": ServiceConfig,
    "gateway": GatewayConfig,
    "tokenizer": TokenizerConfig,
    "scheduler": SchedulerConfig,
    "prefill and decode": WorkerConfig,
    "prefill": PrefillConfig,
    "decode": DecodeConfig,
    "kv_transfer": KvTransferConfig,
}
INHERITED: dict[str, type[ServiceConfig]] = {"prefill": WorkerConfig, "decode": WorkerConfig}
INTRODUCTION = """# Settings

Generated from the services' `config.py` by `make docs`; do not edit.

A setting is read from the environment (`PDMESH_<NAME>`), then from the topology
file that `PDMESH_TOPOLOGY` names (YAML: shared settings at the top level, a section
for each service), then takes its default. All problems are reported together; an
unknown name is an error. `pdmesh up` writes the topology file itself, takes
`--set SERVICE.NAME=VALUE`, and passes no `PDMESH_<NAME>` of its own environment on.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if a table differs")
    check = parser.parse_args().check
    pages = {
        DOCS / "settings.md": INTRODUCTION + "".join(_sections()),
        DOCS / "telemetry.md": telemetry_docs.text(),
    }
    if not check:
        for path, text in pages.items():
            path.write_text(text)
        return 0
    old = [path for path, text in pages.items() if not path.exists() or path.read_text() != text]
    for path in old:
        print(f"docs/{path.name} is out of date: run `make docs`", file=sys.stderr)
    return 1 if old else 0


def _sections() -> Iterator[str]:
    shared = {setting.name: setting for setting in describe(ServiceConfig)}
    for title, config_class in SECTIONS.items():
        known = dict(shared) if title != "Every service" else {}
        if title in INHERITED:
            known |= {setting.name: setting for setting in describe(INHERITED[title])}
        rows = [s for s in describe(config_class) if not _is_known(s, known)]
        if rows:
            yield f"\n## {title}\n\n| name | type | default | meaning |\n|---|---|---|---|\n"
            yield from map(_row, rows)


def _is_known(setting: Setting, known: dict[str, Setting]) -> bool:
    other = known.get(setting.name)
    # The worker id is named after the service everywhere.
    return other is not None and (other.default == setting.default or setting.name == "worker_id")


def _row(setting: Setting) -> str:
    default = "required" if setting.default is None else f"`{setting.default}`"
    name = f"`{setting.name}`"
    extra = [v for v in setting.variables if v != f"PDMESH_{setting.name.upper()}"]
    if extra:
        name += f" (also {', '.join(f'`{variable}`' for variable in extra)})"
    description = setting.description.replace("|", "\\|")
    return f"| {name} | {setting.type_name} | {default} | {description} |\n"


if __name__ == "__main__":
    sys.exit(main())
