"""Convert a GGUF file once to a folder of safetensors and tokenizer files, so that later starts take seconds.

`python -m engine.convert SRC.gguf DST_DIR` writes one JSON object a line to standard output:
`{"stage": "tokenizer" | "weights" | "save" | "done", "fraction": 0..1}`, where fraction is what is behind it of the
whole. An error is one line on standard error, exit code 1.
"""

import contextlib
import io
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from common.errors import BatonError, ConfigError

Progress = Callable[[str, float], None]
GGUF_NAME = "model.gguf"


def convert(source: Path, folder: Path, progress: Progress) -> None:
    """Write the model in `source` to `folder`, which appears complete or not at all.

    The original is kept beside as `model.gguf` (a hard link where possible), for backends that use its quantised
    blocks. A folder that is already complete is left as it is.

    Args:
        source: a `.gguf` file.
        folder: to be made; its parent is made if missing.
        progress: called with the stage that begins and the fraction of the whole that is done.

    Raises:
        ConfigError: the source is missing, corrupt or unsupported, or the folder cannot be written.
    """
    if not (folder / "config.json").exists():
        if source.suffix != ".gguf":
            raise ConfigError(f"{source} is not a .gguf file")
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            # Beside the destination, since a rename is atomic within one file system only.
            partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
            try:
                _write(source, partial, progress)
                _publish(partial, folder)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
        except OSError as error:
            raise ConfigError(f"cannot convert {source} to {folder}: {error}") from error
    progress("done", 1.0)


def _write(source: Path, folder: Path, progress: Progress) -> None:
    # Seconds to import, and not needed when there is nothing to do.
    import torch
    import transformers

    from engine.weights import check_gguf, load_model

    progress("tokenizer", 0.0)
    torch.set_num_threads(max(1, (os.cpu_count() or 1)))
    check_gguf(source)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    except Exception as error:  # foreign code reading a foreign file
        raise ConfigError(f"cannot read the tokenizer of {source}: {' '.join(str(error).split())}") from error
    tokenizer.save_pretrained(folder)
    _restore_pre_tokenizer(source, folder / "tokenizer.json")
    progress("weights", 0.25)
    # The GGUF reader draws a progress bar that nothing else turns off.
    with contextlib.redirect_stderr(io.StringIO()):
        model = load_model(source)
    progress("save", 0.85)
    # The loaded weights are plain fp32; these marks would make a reader look for the quantised file.
    del model.config.quantization_config
    del model.hf_quantizer
    model.is_quantized = False
    model.save_pretrained(folder)
    _keep_original(source, folder / GGUF_NAME)
    for file in folder.iterdir():
        file.chmod(0o644)
    folder.chmod(0o755)


def _restore_pre_tokenizer(source: Path, file: Path) -> None:
    """Split digits one by one where the GGUF says so; the conversion by architecture alone forgets it."""
    import gguf

    field = gguf.GGUFReader(source).fields.get("tokenizer.ggml.pre")
    if field is None or field.contents() != "smollm":
        return
    tokenizer = json.loads(file.read_text())
    digits = {"type": "Digits", "individual_digits": True}
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, tokenizer["pre_tokenizer"]]}
    file.write_text(json.dumps(tokenizer, ensure_ascii=False))


def _keep_original(source: Path, target: Path) -> None:
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copyfile(source, target)


def _publish(partial: Path, folder: Path) -> None:
    try:
        partial.rename(folder)
    except OSError:
        # Somebody else finished the same conversion meanwhile; theirs is as good.
        if not (folder / "config.json").exists():
            raise


def main(arguments: list[str]) -> int:
    """Run the command; return its exit code."""

    def report(stage: str, fraction: float) -> None:
        sys.stdout.write(json.dumps({"stage": stage, "fraction": fraction}) + "\n")
        sys.stdout.flush()

    if len(arguments) != 2:
        sys.stderr.write("usage: python -m engine.convert SRC.gguf DST_DIR\n")
        return 2
    try:
        convert(Path(arguments[0]).expanduser(), Path(arguments[1]).expanduser(), report)
    except BatonError as error:
        sys.stderr.write(f"{error.message}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
