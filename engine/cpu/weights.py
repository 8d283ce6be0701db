"""A model's packed weights in one mapped file: made once from the checkpoint, shared by all workers of a host."""

import hashlib
import json
import logging
import mmap
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, Self

import numpy as np

from common.errors import ConfigError
from common.logs import log
from engine.checkpoint import Blocks, Bytes, Checkpoint, Floats, Gguf, safetensors_files
from engine.cpu.architecture import Architecture
from engine.cpu.native import Format
from engine.cpu.packing import PANEL, block_format, pack_blocks, pack_floats, packed_bytes, padded

logger = logging.getLogger(__name__)

GGUF_NAME = "model.gguf"
CACHE = Path("~/.cache/baton/packed")
_ALIGNMENT = 4096
_CHUNK_ROWS = 4096  # packed at a time: tens of megabytes of temporaries


class Part(NamedTuple):
    """Rows that one tensor of the checkpoint gives to a packed matrix; `heads` > 0: rotated, GGUF permutes them."""

    name: str
    gguf_name: str
    rows: int
    heads: int = 0


class MatrixPlan(NamedTuple):
    """A packed matrix: parts below each other, each padded to a multiple of `row_padding` rows."""

    name: str
    parts: tuple[Part, ...]
    k: int
    row_padding: int = PANEL

    @property
    def rows(self) -> int:
        """Rows with padding."""
        return sum(padded(part.rows, self.row_padding) for part in self.parts)


@dataclass(frozen=True, slots=True)
class Entry:
    """Where an array lies in the packed file; a vector has k = 0 and no format."""

    offset: int
    rows: int
    k: int
    format: int


class PackedWeights:
    """The mapped file. Addresses stay valid until `close`."""

    def __init__(self, mapped: mmap.mmap, entries: dict[str, Entry]) -> None:
        self._mapped: mmap.mmap | None = mapped
        self._base = np.frombuffer(mapped, dtype=np.uint8).ctypes.data
        self.entries = entries

    def address(self, name: str) -> int:
        """Address of an array's first byte."""
        return self._base + self.entries[name].offset

    def close(self) -> None:
        """Unmap. Idempotent."""
        if self._mapped is not None:
            self._mapped.close()
            self._mapped = None

    @classmethod
    def open(cls, folder: Path, architecture: Architecture, format_: Format) -> Self:
        """Map the packed weights of a model folder, packing them first if that was not done before.

        The file lies in the model folder, or in the user's cache where that cannot be written.

        Raises:
            ConfigError: the checkpoint is unusable (the message names the tensor), or no place can be written.
        """
        name = f".packed-{format_.name.lower()}-{_fingerprint(folder, format_)}.bin"
        places = [folder / name, CACHE.expanduser() / name]
        for place in places:
            if (opened := _try_open(place)) is not None:
                return cls(*opened)
        problem: OSError | None = None
        for place in places:
            try:
                _write(place, folder, architecture, format_)
            except OSError as error:
                problem = error
                continue
            if (opened := _try_open(place)) is not None:
                return cls(*opened)
        raise ConfigError(f"cannot keep packed weights of {folder}: {problem}") from problem


def has_quantised_source(folder: Path) -> bool:
    """Whether the folder holds the GGUF file that it was converted from."""
    return (folder / GGUF_NAME).exists()


def plan_matrices(a: Architecture) -> Iterator[MatrixPlan]:
    """Name every matrix that the kernels need, and the tensors it is made of."""
    q, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
    for i in range(len(a.layers)):
        hf, gg = f"model.layers.{i}.", f"blk.{i}."
        attention = (
            Part(f"{hf}self_attn.q_proj.weight", f"{gg}attn_q.weight", q, a.heads),
            Part(f"{hf}self_attn.k_proj.weight", f"{gg}attn_k.weight", kv, a.kv_heads),
            Part(f"{hf}self_attn.v_proj.weight", f"{gg}attn_v.weight", kv),
        )
        output = Part(f"{hf}self_attn.o_proj.weight", f"{gg}attn_output.weight", a.hidden)
        gate = Part(f"{hf}mlp.gate_proj.weight", f"{gg}ffn_gate.weight", a.intermediate)
        up = Part(f"{hf}mlp.up_proj.weight", f"{gg}ffn_up.weight", a.intermediate)
        down = Part(f"{hf}mlp.down_proj.weight", f"{gg}ffn_down.weight", a.hidden)
        yield MatrixPlan(f"{i}.qkv", attention, a.hidden)
        yield MatrixPlan(f"{i}.output", (output,), q)
        yield MatrixPlan(f"{i}.gate_up", (gate, up), a.hidden, 32)
        yield MatrixPlan(f"{i}.down", (down,), a.intermediate)
    embedding = Part("model.embed_tokens.weight", "token_embd.weight", a.vocab)
    yield MatrixPlan("embedding", (embedding,), a.hidden)
    if not a.tied:
        yield MatrixPlan("head", (Part("lm_head.weight", "output.weight", a.vocab),), a.hidden)


def read_vectors(a: Architecture, checkpoint: Checkpoint) -> Iterator[tuple[str, Floats]]:
    """Yield norms (with the family's offset) and biases, under the kernels' names."""

    def norm(name: str, length: int) -> Floats:
        return checkpoint.vector(name, length) + np.float32(a.norm_offset)

    yield "final_norm", norm("model.norm.weight", a.hidden)
    for i in range(len(a.layers)):
        hf = f"model.layers.{i}."
        after = f"{hf}post_attention_layernorm.weight"
        yield f"{i}.attention_norm", norm(f"{hf}input_layernorm.weight", a.hidden)
        if a.has_post_norms:
            yield f"{i}.post_attention_norm", norm(after, a.hidden)
            yield f"{i}.mlp_norm", norm(f"{hf}pre_feedforward_layernorm.weight", a.hidden)
            yield f"{i}.post_mlp_norm", norm(f"{hf}post_feedforward_layernorm.weight", a.hidden)
        else:
            yield f"{i}.mlp_norm", norm(after, a.hidden)
        if a.has_head_norms:
            yield f"{i}.query_norm", norm(f"{hf}self_attn.q_norm.weight", a.head_dim)
            yield f"{i}.key_norm", norm(f"{hf}self_attn.k_norm.weight", a.head_dim)
        if a.has_qkv_bias:
            sizes = {"q": a.heads * a.head_dim, "k": a.kv_heads * a.head_dim, "v": a.kv_heads * a.head_dim}
            biases = [checkpoint.vector(f"{hf}self_attn.{x}_proj.bias", n) for x, n in sizes.items()]
            yield f"{i}.qkv_bias", np.concatenate(biases)
        if a.has_output_bias:
            yield f"{i}.output_bias", checkpoint.vector(f"{hf}self_attn.o_proj.bias", a.hidden)
        if a.has_mlp_bias:
            halves = [checkpoint.vector(f"{hf}mlp.{x}_proj.bias", a.intermediate) for x in ("gate", "up")]
            yield f"{i}.gate_up_bias", np.concatenate([np.pad(half, (0, -len(half) % 32)) for half in halves])
            yield f"{i}.down_bias", checkpoint.vector(f"{hf}mlp.down_proj.bias", a.hidden)


class _Writer:
    """Appends aligned arrays to a file and remembers where they went."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.entries: dict[str, Entry] = {}

    def begin(self, name: str, rows: int, k: int, format_: int) -> None:
        self._stream.write(bytes(-self._stream.tell() % _ALIGNMENT))
        self.entries[name] = Entry(self._stream.tell(), rows, k, format_)

    def write(self, data: Bytes | Floats) -> None:
        self._stream.write(np.ascontiguousarray(data).data)

    def finish(self) -> None:
        """End with the table of contents and its length."""
        table = json.dumps({n: [e.offset, e.rows, e.k, e.format] for n, e in self.entries.items()}).encode()
        self._stream.write(table + len(table).to_bytes(8, "little"))


def _write(target: Path, folder: Path, architecture: Architecture, format_: Format) -> None:
    log(logger, logging.INFO, "packing weights", model=str(folder), format=format_.name.lower(), target=str(target))
    checkpoint = Checkpoint.open(folder)
    gguf = Gguf(folder / GGUF_NAME) if format_ is not Format.FP32 and has_quantised_source(folder) else None
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=target.parent, prefix=target.name, delete=False) as stream:
        try:
            writer = _Writer(stream)
            for name, values in read_vectors(architecture, checkpoint):
                writer.begin(name, len(values), 0, 0)
                writer.write(np.pad(values, (0, -len(values) % 32)))
            for plan in plan_matrices(architecture):
                _write_matrix(writer, plan, checkpoint, gguf, format_)
            writer.finish()
            stream.flush()
            # What earlier sources or code left; a worker that has it mapped keeps it.
            for stale in folder.glob(f".packed-{format_.name.lower()}-*.bin"):
                stale.unlink(missing_ok=True)
            Path(stream.name).replace(target)
        except BaseException:
            Path(stream.name).unlink(missing_ok=True)
            raise


def _write_matrix(
    writer: _Writer, plan: MatrixPlan, checkpoint: Checkpoint, gguf: Gguf | None, format_: Format
) -> None:
    if plan.name in ("embedding", "head") and format_ is Format.Q4:
        format_ = Format.W8  # 4 bits cost the head more than they save
    blocks = [_blocks(gguf, part, plan.k, format_) for part in plan.parts]
    kinds = {block_format(b.kind) if b is not None else None for b in blocks}
    chosen = kinds.pop() if len(kinds) == 1 else None
    final = chosen or (Format.W8 if Format.W8 in kinds else format_)
    writer.begin(plan.name, plan.rows, padded(plan.k), int(final))
    for part, source in zip(plan.parts, blocks, strict=True):
        if chosen is not None and source is not None:
            writer.write(pack_blocks(source))
        else:
            for begin in range(0, part.rows, _CHUNK_ROWS):
                end = min(part.rows, begin + _CHUNK_ROWS)
                writer.write(pack_floats(checkpoint.rows(part.name, (part.rows, plan.k), begin, end), final))
        missing = padded(part.rows, plan.row_padding) - padded(part.rows, PANEL)
        writer.write(np.zeros(packed_bytes(missing, padded(plan.k), final), dtype=np.uint8))


def _blocks(gguf: Gguf | None, part: Part, k: int, format_: Format) -> Blocks | None:
    """Return a part's blocks in the checkpoint's row order, if the GGUF has them as wide as wanted or wider."""
    found = gguf.find(part.gguf_name, (part.rows, k)) if gguf is not None else None
    if gguf is None or found is None or (block_format(found.kind) is Format.Q4 and format_ is not Format.Q4):
        return None
    if part.heads and gguf.architecture == "llama":
        # GGUF's Llama rotates neighbours, the checkpoint rotates halves: rows (h, i, half) here are (h, half, i) there.
        half = part.rows // part.heads // 2
        order = np.arange(part.rows).reshape(part.heads, half, 2).swapaxes(1, 2).reshape(-1)
        return Blocks(found.kind, found.data[order])
    return found


def _try_open(file: Path) -> tuple[mmap.mmap, dict[str, Entry]] | None:
    """Map a packed file; None: it is not there or not whole."""
    populate = getattr(mmap, "MAP_POPULATE", 0)
    try:
        with file.open("rb") as stream:
            mapped = mmap.mmap(stream.fileno(), 0, flags=mmap.MAP_SHARED | populate, prot=mmap.PROT_READ)
        length = int.from_bytes(mapped[-8:], "little")
        table: dict[str, list[Any]] = json.loads(mapped[-8 - length : -8])
        return mapped, {name: Entry(*(int(x) for x in entry)) for name, entry in table.items()}
    except (OSError, ValueError):
        return None


def _fingerprint(folder: Path, format_: Format) -> str:
    """Names the sources as they are now and the code that packs them."""
    here = Path(__file__).parent
    key = hashlib.sha256((here / "packing.py").read_bytes() + (here / "weights.py").read_bytes())
    key.update(str(folder.resolve()).encode())
    files = [folder / "config.json", *safetensors_files(folder)]
    if format_ is not Format.FP32:
        files.append(folder / GGUF_NAME)
    for file in files:
        if file.exists():
            stat = file.stat()
            key.update(f"{file.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return key.hexdigest()[:16]
