"""The formats stay close to fp32: on a shipped text, the default one as close as it promises."""

from collections.abc import Callable
from pathlib import Path

import pytest

from common.config import DEMO_MODEL, ModelConfig
from common.errors import ConfigError
from engine.cpu.backend import KV_DTYPES
from engine.cpu.build import supported_isas
from engine.quality import FORMATS, Format, compare, load_text

pytestmark = pytest.mark.skipif(not supported_isas(), reason="needs AVX2")
DEFAULT = Format("q4", "int16", "float16")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_default_format_keeps_the_demo_model_s_predictions() -> None:
    folder = ModelConfig().cache_dir.expanduser() / DEMO_MODEL
    if not (folder / "config.json").exists():
        pytest.skip(f"no demo model at {folder}")
    token_ids = load_text(folder)
    assert len(token_ids) >= 4000

    [score] = compare(folder, token_ids, [DEFAULT])

    assert score.divergence <= 0.01
    assert score.agreement >= 0.94


def test_every_format_is_measured_and_fp32_is_exact(tiny_model: Callable[[str], Path]) -> None:
    token_ids = [7 * i % 97 for i in range(300)]

    scores = compare(tiny_model("llama"), token_ids, FORMATS, threads=1)

    by_format = {score.format: score for score in scores}
    assert set(by_format) == set(FORMATS)
    assert Format("q4", "int8", "int8") in by_format
    assert {format_.kv_dtype for format_ in FORMATS if format_.weights == "w8"} == set(KV_DTYPES["w8"])
    assert by_format[Format("fp32", "int16", "float32")].divergence < 1e-8
    assert by_format[Format("fp32", "int16", "float32")].agreement > 0.99
    bytes_in_pool, halves = (by_format[Format("fp32", "int16", kv)].divergence for kv in ("int8", "float16"))
    assert 0 < halves < bytes_in_pool < 0.05


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        load_text(tmp_path)
