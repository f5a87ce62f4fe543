"""``hf-flash-cupy ppl`` from options to exit code, on a tiny random Llama with a tiny tokenizer."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedTokenizerFast
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from typer.testing import CliRunner, Result

from hf_flash_cupy.cli import app
from hf_flash_cupy.errors import MissingDependency
from hf_flash_cupy.evaluation import evaluate, schema
from hf_flash_cupy.jit import host_compiler

from .tiny import CONFIGS, VOCAB

WORDS = ["<s>", "</s>", "?", *(f"w{number}" for number in range(VOCAB - 3))]


def tokenizer() -> Any:
    vocabulary = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="?"))
    vocabulary.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=vocabulary, bos_token="<s>", eos_token="</s>", unk_token="?")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-llama")
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(CONFIGS["llama"]()).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "words.txt"
    picks = torch.randint(3, VOCAB, (160,), generator=torch.Generator().manual_seed(1)).tolist()
    file.write_text(" ".join(WORDS[pick] for pick in picks))
    return file


@pytest.fixture
def ppl(model: Path, text: Path) -> Callable[..., Result]:
    """Run the command on the tiny model; ``--context 64`` and JSON unless said otherwise."""

    def run(*options: str, attn: str = "eager,sdpa", format: str = "json", context: int = 64) -> Result:
        common = ["--model", str(model), "--text", str(text), "--device", "cpu", "--context", str(context)]
        command = ["ppl", *common, "--attn", attn, "--format", format, *options]
        return CliRunner().invoke(app, command, catch_exceptions=False)

    return run


def report(result: Result) -> dict[str, Any]:
    found = json.loads(result.stdout)
    schema.Report.model_validate(found)
    assert found["exit_code"] == result.exit_code, result.output
    return dict(found)


@pytest.fixture
def registered() -> Iterator[Callable[[str, Any], None]]:
    """Register attention functions for one test."""
    names = []

    def register(name: str, function: Any) -> None:
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, sdpa_mask)
        names.append(name)

    yield register
    for name in names:
        del AttentionInterface._global_mapping[name], AttentionMaskInterface._global_mapping[name]


class TestNumbers:
    def test_eager_and_sdpa_agree_with_the_model_s_own_loss(self, ppl: Any, model: Path, text: Path) -> None:
        found = report(ppl("--protocol", "disjoint", context=160))
        llama = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        ids = tokenizer()(text.read_text(), return_tensors="pt").input_ids
        with torch.no_grad():
            loss = float(llama(ids, labels=ids).loss)
        assert found["results"][0]["nll_mean"] == pytest.approx(loss, rel=1e-6)
        assert found["results"][0]["ppl"] == pytest.approx(math.exp(loss), rel=1e-5)
        assert [r["backend"] for r in found["results"]] == ["eager", "sdpa"]
        assert found["comparisons"][0]["verdict"] in ("identical", "within tolerance")
        assert found["results"][1]["calls_per_layer"] == {"0": 1, "1": 1}

    @pytest.mark.parametrize("protocol", ["strided", "disjoint", "llama.cpp", "lm-eval", "gptq", "hf-doc"])
    def test_every_protocol_prints_itself(self, ppl: Any, protocol: str) -> None:
        """P11: what a perplexity depends on is in the report."""
        options = ["--protocol", protocol, "--no-checks", "--warmup", "0"]
        found = report(ppl(*options, attn="sdpa"))
        expected = {
            "strided": 159,
            "disjoint": 157,
            "llama.cpp": 62,
            "lm-eval": 160,
            "gptq": 126,
            "hf-doc": 159,
        }
        assert found["protocol"]["scored"] == expected[protocol]
        table = ppl(*options, attn="sdpa", format="table").stdout
        prefix = "bos: <s> (id 0)" if protocol == "lm-eval" else "none (auto"
        for words in (
            "words.txt",
            "joiner '\\n\\n'",
            f"{protocol}, context 64",
            prefix,
            "float32",
            "tokens scored",
        ):
            assert words in table

    def test_batches_and_padding_sides_change_nothing(self, ppl: Any, tmp_path: Path) -> None:
        """P07: documents of 5 to 60 tokens; the padding side does not matter, as nothing is padded."""
        files = []
        for number, length in enumerate([5, 60, 17, 5, 17, 33, 5, 60]):
            files += ["--text", str(tmp_path / f"{number}.txt")]
            (tmp_path / f"{number}.txt").write_text(
                " ".join(WORDS[3 + (number * 7 + i * 5) % 90] for i in range(length))
            )
        values = []
        for side in ("left", "right"):
            padded = tokenizer()
            padded.padding_side = side
            padded.pad_token = "</s>"
            padded.save_pretrained(tmp_path / side)
            for size in ("1", "4", "16"):
                options = [
                    "--mode",
                    "documents",
                    *files,
                    "--batch-size",
                    size,
                    "--tokenizer",
                    str(tmp_path / side),
                ]
                found = report(ppl("--no-checks", *options, attn="eager"))
                assert found["protocol"]["scored"] == 159 + 202 - 8
                values.append(found["results"][0]["nll_mean"])
        assert values == pytest.approx([values[0]] * 6, rel=1e-6)

    def test_several_lengths(self, ppl: Any) -> None:
        found = report(ppl("--lengths", "16,32", "--stride", "32", "--no-checks"))
        assert [(s["protocol"]["context"], s["protocol"]["stride"]) for s in found["lengths"]] == [
            (16, 8),
            (32, 16),
        ]
        assert found["protocol"]["context"] == 64
        assert {gate["name"].rpartition(" at ")[2] for gate in found["gates"]} == {"64", "16", "32"}

    def test_the_noise_floor_brings_eager_and_sdpa(self, ppl: Any) -> None:
        found = report(ppl("--noise-floor", "--no-checks", attn="sdpa"))
        assert [r["attn"] for r in found["results"]] == ["sdpa", "eager"]
        assert found["noise_floor"] == found["comparisons"][0]

    def test_bfloat16_is_judged_by_its_floor(self, ppl: Any) -> None:
        found = report(ppl("--dtype", "bfloat16"))
        assert found["model"]["dtype"] == "bfloat16"
        assert found["comparisons"][0]["verdict"] == "within tolerance"

    def test_out_keeps_the_json(self, ppl: Any, tmp_path: Path) -> None:
        result = ppl("--out", str(tmp_path / "new" / "folder"), "--no-checks", format="csv")
        kept = json.loads((tmp_path / "new" / "folder" / "result.json").read_text())
        assert result.stdout.splitlines()[1].split(",")[4] == str(kept["protocol"]["context"])


class TestOurKernels:
    def test_they_run_on_the_cpu_and_equal_eager(self, ppl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("HF_FLASH_CUPY_CPU")  # the command sets it for itself
        result = ppl(attn="eager,cupy_fa2")
        assert "cupy_fa2 on this CPU: the CUDA kernels themselves" in result.stderr
        found = report(result)
        ours = found["results"][1]
        assert ours["backend"] == "host"
        assert ours["launches_per_layer"] == {"0": 1, "1": 1}
        assert abs(found["comparisons"][0]["dlnppl"]) <= 1e-5
        assert result.exit_code == 0

    def test_without_a_compiler_it_stops_with_the_mend(self, ppl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        def missing() -> Any:
            raise MissingDependency("No C++ compiler was found.", mend="apt-get install g++")

        monkeypatch.setattr(host_compiler, "find_compiler", missing)
        result = ppl(attn="eager,cupy_fa2")
        assert result.exit_code == 3
        assert "To mend: apt-get install g++" in result.stderr
        assert result.stdout == ""

    def test_another_backend_than_the_kernels_fails_the_probe(self, ppl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(evaluate, "_KERNELS_ON_CPU", "HF_FLASH_CUPY_UNREAD")
        monkeypatch.setenv("HF_FLASH_CUPY_CPU", "sdpa")
        found = report(ppl(attn="eager,cupy_fa2"))
        assert found["exit_code"] == 4
        assert [check["name"] for check in found["checks"] if not check["ok"]] == ["calls cupy_fa2"]
        assert found["results"] == []


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_a_gpu_the_kernels_run_there(ppl: Any, dtype: str) -> None:
    found = report(ppl("--device", "cuda", "--dtype", dtype, attn="eager,sdpa,cupy_fa2"))
    ours = found["results"][2]
    assert (ours["backend"], ours["launches_per_layer"]) == ("cuda", {"0": 1, "1": 1})
    assert ours["peak_bytes"] > 0
    assert found["run"]["gpu"]
    assert all(check["ok"] for check in found["checks"])
    if dtype == "float32":
        assert found["exit_code"] == 0


def leaking(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
    """Causal attention that sees one key too many, as a mask rounded up to a block would let it."""
    kwargs["is_causal"] = False
    length = query.shape[2]
    visible = torch.ones(length, length, dtype=torch.bool).tril(1)[None, None]
    return sdpa_attention_forward(module, query, key, value, visible, **kwargs)


def leaking_blocks(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
    """Causal by blocks of 16: right at the block borders, wrong within."""
    kwargs["is_causal"] = False
    block = torch.arange(query.shape[2]) // 16
    visible = (block[:, None] >= block[None, :])[None, None]
    return sdpa_attention_forward(module, query, key, value, visible, **kwargs)


class TestProbes:
    @pytest.mark.parametrize("attention", [leaking, leaking_blocks])
    def test_a_leak_is_caught_before_any_number(self, ppl: Any, registered: Any, attention: Any) -> None:
        registered("leaking", attention)
        found = report(ppl(attn="eager,leaking"))
        assert found["exit_code"] == 4
        assert [check["name"] for check in found["checks"] if not check["ok"]] == ["causality leaking"]
        assert found["results"] == []

    def test_rows_of_a_batch_that_mix_are_caught(self, ppl: Any, registered: Any) -> None:
        def mixing(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
            return sdpa_attention_forward(module, query, key, value.flip(0), mask, **kwargs)

        registered("mixing", mixing)
        found = report(ppl(attn="eager,mixing"))
        assert [check["name"] for check in found["checks"] if not check["ok"]] == ["batch mixing"]

    def test_a_layer_that_runs_something_else_is_caught(self, ppl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        load = evaluate.load

        def one_layer_stays_eager(*args: Any) -> Any:
            loaded = load(*args)
            attention = loaded.model.model.layers[1].self_attn
            attention.config = copy.deepcopy(attention.config)
            return loaded

        monkeypatch.setattr(evaluate, "load", one_layer_stays_eager)
        found = report(ppl())
        (calls,) = [check for check in found["checks"] if check["name"] == "calls sdpa"]
        assert not calls["ok"]
        assert "1 calls (baseline 2)" in calls["detail"]

    def test_infinite_logits_are_caught(self, ppl: Any, registered: Any) -> None:
        def broken(*args: Any, **kwargs: Any) -> Any:
            out, weights = sdpa_attention_forward(*args, **kwargs)
            return out.index_fill(1, torch.tensor([5]), math.nan), weights

        registered("broken", broken)
        found = report(ppl(attn="eager,broken"))
        assert found["exit_code"] == 4
        assert {c["name"] for c in found["checks"] if not c["ok"]} >= {"finite broken"}

    def test_a_nan_that_the_probes_missed_names_window_and_token(self, ppl: Any, registered: Any) -> None:
        calls = 0

        def later(module: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += module.layer_idx  # 1 in the last of the two layers
            out, weights = sdpa_attention_forward(module, *args, **kwargs)
            spoiled = calls == 3 and module.layer_idx == 1
            return (out.index_fill(1, torch.tensor([40]), math.nan) if spoiled else out), weights

        registered("later", later)
        found = report(ppl("--no-checks", "--warmup", "0", attn="eager,later"))
        assert found["exit_code"] == 4
        (failed,) = [check for check in found["checks"] if not check["ok"]]
        assert failed["name"] == "finite nll later"
        # The first pass counts the calls, so the third is that of the second window, tokens 32 to 95.
        assert "token 73 in window 1" in failed["detail"]
        assert len(found["windows"]) == 1

    def test_a_model_that_routes_past_the_registry_is_caught(
        self, ppl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        transformers.BloomForCausalLM(CONFIGS["bloom"]()).save_pretrained(tmp_path)
        tokenizer().save_pretrained(tmp_path)
        found = report(ppl("--model", str(tmp_path), attn="eager"))
        assert found["exit_code"] == 4
        assert [check["name"] for check in found["checks"] if not check["ok"]] == ["calls eager"]


class TestExitCodes:
    def test_a_failed_gate_is_1(self, ppl: Any) -> None:
        found = report(ppl("--max-ppl", "2", "--no-checks", attn="sdpa"))
        assert found["exit_code"] == 1
        assert [(gate["name"], gate["ok"]) for gate in found["gates"]] == [("ppl sdpa", False)]

    def test_a_different_attention_fails_its_tolerance(self, ppl: Any, registered: Any) -> None:
        def hotter(*args: Any, **kwargs: Any) -> Any:
            return sdpa_attention_forward(*args, **(kwargs | {"scaling": kwargs["scaling"] * 1.1}))

        registered("hotter", hotter)
        found = report(ppl(attn="eager,hotter"))
        assert found["comparisons"][0]["verdict"] == "different"
        assert found["exit_code"] == 1

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            (["--attn", "nonsense"], "--attn nonsense: unknown; known are .*eager.*sdpa"),
            (["--attn", ","], "--attn"),
            (["--context", "4096"], "--context 4096: .* at most 256 tokens"),
            (["--prefix", "4096"], "--prefix 4096: .* below"),
            (["--device", "tpu"], "--device tpu"),
            (["--lengths", "a"], "--lengths a"),
            (["--text", "missing.txt"], "--text missing.txt"),
            (["--protocol", "gptq", "--max-tokens", "20"], "no window in 20 tokens"),
            (["--max-tokens", "4"], "--no-checks"),
            (["--noise-floor", "--attn", "cupy_fa2"], "--noise-floor"),
            (["--protocol", "guess"], "guess"),
        ],
    )
    def test_wrong_use_is_2_and_names_the_option(self, ppl: Any, options: list[str], words: str) -> None:
        result = ppl(*options)
        assert result.exit_code == 2
        assert re.search(words, " ".join(result.stderr.split())), result.stderr

    def test_a_short_context_is_for_those_who_skip_the_probes(self, ppl: Any) -> None:
        found = report(ppl("--no-checks", "--max-tokens", "12", context=5, attn="sdpa"))
        assert found["protocol"]["scored"] == 11

    def test_a_missing_model_is_3(self, ppl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        def ask(*_: Any, **__: Any) -> None:
            raise OSError("no route to the hub")

        monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", ask)
        result = ppl("--model", "owner/nowhere")
        assert result.exit_code == 3
        assert "owner/nowhere could not be loaded" in result.stderr

    def test_an_interruption_is_130_and_keeps_the_windows(self, ppl: Any, registered: Any) -> None:
        calls = 0

        def impatient(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > 6:  # the counting pass, two windows, then Ctrl-C in the third
                raise KeyboardInterrupt
            return sdpa_attention_forward(*args, **kwargs)

        registered("impatient", impatient)
        found = report(ppl("--no-checks", "--warmup", "0", attn="eager,impatient"))
        assert found["exit_code"] == 130
        assert [window["index"] for window in found["windows"]] == [0, 1]
        assert found["protocol"]["scored"] == 95

    def test_the_schema_is_printed(self) -> None:
        result = CliRunner().invoke(app, ["ppl", "--print-schema"])
        assert result.exit_code == 0
        assert json.loads(result.stdout) == schema.json_schema()
