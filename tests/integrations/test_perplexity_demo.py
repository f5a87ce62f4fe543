"""The demo model and text: what they are, and the perplexity that every machine must find."""

from __future__ import annotations

import hashlib
import math
from contextlib import nullcontext

import pytest
from transformers import AutoTokenizer

from hf_flash_cupy.evaluation import demo
from hf_flash_cupy.evaluation.data import Prefix, read_corpus, resolve_prefix, tokenize
from hf_flash_cupy.evaluation.evaluate import Observer, Settings, evaluate

# float32, no prefix, context 512, stride 256, the first 8,192 tokens.
REFERENCE = 31.069917


@pytest.mark.skipif(not demo.is_ready(), reason="the demo is not in the cache: hf-flash-cupy demo fetch")
def test_the_cached_text_and_its_tokens() -> None:
    corpus = read_corpus([])
    assert (corpus.bytes, corpus.words) == (530_083, 88_371)
    assert corpus.sha256 == "81e9c8621769147b6144692891bcf45a17860e2a81b5746d324ea5821ed6f8c5"
    tokenizer = AutoTokenizer.from_pretrained(demo.model_dir())
    prefix = resolve_prefix(tokenizer, "auto")
    assert prefix == Prefix((), "none (auto: the tokenizer adds no token)")
    stream = tokenize(tokenizer, corpus, prefix)
    assert (len(stream.ids), stream.truncated) == (102_981, 0)
    assert hashlib.sha256(tokenizer.decode(stream.ids).encode()).hexdigest() == corpus.sha256


@pytest.mark.full
def test_eager_and_sdpa_reproduce_the_reference() -> None:
    demo.fetch()
    settings = Settings(attns=("eager", "sdpa"), device="cpu", max_tokens=8192, context=512, stride=256, warmup=0)
    silent = Observer(lambda _line: None, lambda _what, _windows: nullcontext(lambda *_progress: None))
    report = evaluate(settings, silent)
    assert report.protocol.scored == 8191
    for result in report.results:
        assert result.ppl is not None
        assert abs(math.log(result.ppl / REFERENCE)) <= 2e-4
        assert result.bits_per_byte == pytest.approx(0.95723, abs=2e-5)
        assert result.ppl * (result.se_window or 0) == pytest.approx(1.37, abs=0.01)
    assert report.exit_code == 0
