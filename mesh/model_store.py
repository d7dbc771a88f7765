"""Installed models: one checksummed folder each under `<home>/models`."""

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from checkpoint.folder import InvalidFolder, read_object
from mesh import smollm2
from mesh.model_folder import check_model_folder

DEFAULT_MODEL = smollm2.NAME

MANIFEST = "pdmesh-manifest.json"
# Raised when a conversion writes other bytes than before; older folders are then rebuilt.
_FORMAT = 1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?")
_HUB_PATTERNS = ("*.safetensors", "*.json", "*.jinja")
# Subfolders and `consolidated…` hold the same weights in other forms.
_HUB_IGNORED = ("*/*", "consolidated*")

Report = Callable[[str], None]


class ModelStoreError(Exception):
    """A model cannot be installed or found; the message says what and where."""


@dataclass(frozen=True)
class InstalledFile:
    """One file as it was installed."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What was installed, and where it came from."""

    name: str
    source: dict[str, str]
    files: dict[str, InstalledFile]

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files.values())

    @property
    def revision(self) -> str:
        """Equal for two installations exactly when they compute the same thing."""
        parts = [
            f"{name}={file.sha256}"
            for name, file in sorted(self.files.items())
            if name == "config.json" or name.endswith(".safetensors")
        ]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def add(home: Path, spec: str, name: str | None = None, report: Report = print) -> Path:
    """Install the default model, a folder, or a Hugging Face repository, and return its folder."""
    if spec == smollm2.NAME and name in (None, spec):
        return ensure(home, spec, report, is_whole=lambda folder: not damaged_files(folder))
    if Path(spec).expanduser().is_dir():
        return add_folder(home, Path(spec).expanduser(), name, report)
    if spec.count("/") == 1 and _NAME.fullmatch(spec):
        return add_from_hub(home, spec, name, report)
    raise ModelStoreError(
        f"{spec}: neither {smollm2.NAME}, nor a folder, nor a Hugging Face repository (ORG/NAME)"
    )


def ensure(
    home: Path,
    name: str,
    report: Report = print,
    install: Callable[[Path], dict[str, str]] | None = None,
    is_whole: Callable[[Path], bool] = lambda folder: read_manifest(folder) is not None,
) -> Path:
    """Return the model's folder; the default model is installed first unless it `is_whole`."""
    if name != smollm2.NAME:
        return resolve(home, name)

    def fill(folder: Path) -> dict[str, str]:
        report(f"Downloading and converting {name} (once)")
        return (install or smollm2.install)(folder)

    return _install(home, name, fill, is_whole)


def add_folder(home: Path, path: Path, name: str | None, report: Report = print) -> Path:
    """Install a Hugging Face folder of a supported architecture, by hard links where possible."""
    path = path.resolve()

    def fill(folder: Path) -> dict[str, str]:
        report(f"Checking {path}")
        for file in check_model_folder(path):
            _link_or_copy(file, folder / file.name)
        return {"path": str(path)}

    return _install(home, name or path.name, fill)


def add_from_hub(
    home: Path,
    repo_id: str,
    name: str | None,
    report: Report = print,
    download: Callable[..., str] | None = None,
) -> Path:
    """Install a repository of the Hugging Face hub; only safetensors and JSON are fetched."""
    if download is None:
        from huggingface_hub import snapshot_download  # slow to import

        download = snapshot_download

    def fill(folder: Path) -> dict[str, str]:
        report(f"Downloading {repo_id}")
        snapshot = Path(
            download(
                repo_id, allow_patterns=list(_HUB_PATTERNS), ignore_patterns=list(_HUB_IGNORED)
            )
        )
        for file in check_model_folder(snapshot):
            _link_or_copy(file, folder / file.name)
        return {"repo_id": repo_id, "commit": snapshot.name}

    return _install(home, name or repo_id, fill)


def add_quantized(
    home: Path, name: str, quantization: str, new_name: str | None, report: Report = print
) -> Path:
    """Install a copy of an installed model with quantized weights; default name: NAME-int4."""
    source = resolve(home, name)

    def fill(folder: Path) -> dict[str, str]:
        report(f"Quantizing {name} to {quantization}")
        _quantize(source, folder, quantization)
        check_model_folder(folder)
        return {"model": name, "quantization": quantization}

    return _install(home, new_name or f"{name}-{quantization}", fill)


def write_quantized(source: Path, target: Path, quantization: str) -> None:
    """Write a quantized copy of a model to a folder that does not exist yet."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.mkdir()
    except OSError as error:
        raise ModelStoreError(f"cannot make {target}: {error.strerror}") from error
    try:
        _quantize(source, target, quantization)
    except ModelStoreError:
        shutil.rmtree(target)
        raise


def _quantize(source: Path, target: Path, quantization: str) -> None:
    """Fill an empty folder, in a process of its own: only workers have the engine loaded."""
    command = [sys.executable, "-m", "engine.quantize_checkpoint", str(source), str(target)]
    command += ["--quantization", quantization]
    result = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    if result.returncode != 0:
        raise ModelStoreError(f"cannot quantize {source}: {result.stderr.strip()}")


def resolve(home: Path, name: str) -> Path:
    """Return the folder of an installed model."""
    folder = _folder(home, name)
    if read_manifest(folder) is None:
        installed = ", ".join(manifest.name for manifest in list_models(home)) or "none"
        raise ModelStoreError(
            f"model {name!r} is not installed in {home} (installed: {installed});"
            f" `pdmesh model add` installs it"
        )
    return folder


def list_models(home: Path) -> list[Manifest]:
    """Return what is installed, by name."""
    models = home / "models"
    folders = sorted(models.iterdir()) if models.is_dir() else []
    manifests = (read_manifest(folder) for folder in folders if not folder.name.startswith("."))
    return [manifest for manifest in manifests if manifest is not None]


def read_manifest(folder: Path) -> Manifest | None:
    """Return the folder's manifest, or None where no complete installation is."""
    try:
        values = read_object(folder / MANIFEST)
        if values.pop("format", None) != _FORMAT:
            return None
        values["files"] = {name: InstalledFile(**file) for name, file in values["files"].items()}
        manifest = Manifest(**values)
    except (InvalidFolder, KeyError, TypeError, AttributeError):
        # Missing, or damaged like any other file may be.
        return None
    for name, file in manifest.files.items():
        if not (folder / name).is_file() or (folder / name).stat().st_size != file.size:
            return None
    return manifest


def damaged_files(folder: Path) -> list[str]:
    """Return the files that differ from what the manifest of the folder says."""
    manifest = read_manifest(folder)
    if manifest is None:
        return [MANIFEST]
    return [name for name, file in manifest.files.items() if _describe(folder / name) != file]


def _install(
    home: Path,
    name: str,
    fill: Callable[[Path], dict[str, str]],
    is_whole: Callable[[Path], bool] = lambda folder: False,
) -> Path:
    """Let `fill` write into a temporary folder and move that into place, once for all processes."""
    folder = _folder(home, name)
    with _locked(folder):
        if is_whole(folder):
            return folder
        staging = Path(tempfile.mkdtemp(prefix=_staging_prefix(folder), dir=folder.parent))
        try:
            source = fill(staging)
            _seal(staging, name, source)
            _move_into_place(staging, folder)
        except (OSError, InvalidFolder, smollm2.ConversionError) as error:
            raise ModelStoreError(f"cannot install {name}: {error}") from error
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return folder


def _folder(home: Path, name: str) -> Path:
    if not _NAME.fullmatch(name):
        raise ModelStoreError(f"{name!r} is not a model name (NAME or ORG/NAME)")
    return home / "models" / name.replace("/", "--")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the model's lock; what a killed process left half done is removed."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for leftover in folder.parent.glob(f"{_staging_prefix(folder)}*"):
            shutil.rmtree(leftover)
        yield


def _staging_prefix(folder: Path) -> str:
    return f".{folder.name}.staging-"


def _seal(folder: Path, name: str, source: dict[str, str]) -> None:
    """Write the manifest over all files and make them readable by everyone."""
    folder.chmod(0o755)
    files = {path.name: _describe(path) for path in sorted(folder.iterdir())}
    manifest = {"format": _FORMAT, **asdict(Manifest(name, source, files))}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    for path in folder.iterdir():
        # A hard link shares its mode with the user's own file, which stays as it is.
        if path.stat().st_nlink == 1:
            path.chmod(0o644)


def _move_into_place(staging: Path, folder: Path) -> None:
    if not folder.exists():
        staging.rename(folder)
        return
    # Engines that have the old files mapped keep them until they end.
    replaced = staging.with_name(staging.name + ".replaced")
    folder.rename(replaced)
    staging.rename(folder)
    shutil.rmtree(replaced)


def _link_or_copy(source: Path, destination: Path) -> None:
    if source.name == MANIFEST:
        return
    try:
        os.link(source.resolve(), destination)
    except OSError:  # another file system, or not our file
        shutil.copyfile(source, destination)


def _describe(path: Path) -> InstalledFile:
    with path.open("rb") as file:
        return InstalledFile(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())
