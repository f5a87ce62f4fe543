"""NVRTC: which target is chosen for which device, what comes back, what is said when it goes wrong."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import pytest
from jit_fixture import TINY_PARAMS, run_child, tiny_config, write_sources

from hf_flash_cupy import params
from hf_flash_cupy.errors import CompilationError, MissingDependency
from hf_flash_cupy.jit import compiler, source
from hf_flash_cupy.jit.compiler import Target, select_target

NVRTC_12_4 = (50, 52, 53, 60, 61, 62, 70, 72, 75, 80, 86, 87, 89, 90)
NVRTC_12_8 = (*NVRTC_12_4, 100, 101, 120)
NVRTC_13 = (75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = write_sources(tmp_path / "cuda_src")
    monkeypatch.setattr(source, "sources_root", lambda: root)
    monkeypatch.setitem(params.PARAMS, "TinyParams", TINY_PARAMS)
    return root


def compile_tiny(arch: str | Target, **changes: object) -> compiler.CompiledUnit:
    config = tiny_config(arch if isinstance(arch, str) else arch.arch, **changes)
    return compiler.compile_cubin(source.generate_source(config), config.name, arch)


@pytest.mark.parametrize(
    ("arch", "device", "supported", "expected"),
    [
        ("75", (7, 5), NVRTC_13, "sm_75"),
        ("80", (8, 0), NVRTC_13, "sm_80"),
        ("86", (8, 6), NVRTC_13, "sm_86"),
        ("86", (8, 7), NVRTC_13, "sm_87"),
        ("89", (8, 9), NVRTC_12_4, "sm_89"),
        ("90", (9, 0), NVRTC_12_4, "sm_90"),
        ("90a", (9, 0), NVRTC_12_4, "sm_90a"),
        ("100", (10, 0), NVRTC_13, "sm_100"),
        ("120", (12, 0), NVRTC_13, "sm_120"),
        # The exact one is unknown, but the device runs the cubin of an older one of its major version.
        ("120", (12, 1), NVRTC_12_8, "sm_120"),
        # 10.1 is another chip: its cubin would not run on 10.3.
        ("100", (10, 3), NVRTC_12_8, "sm_100"),
        # NVRTC is older than the device, or the device newer than everything: PTX of the nearest.
        ("100", (10, 0), NVRTC_12_4, "compute_90"),
        ("120", (12, 0), NVRTC_12_4, "compute_90"),
        ("120", (13, 0), NVRTC_13, "compute_121"),
        ("120", (20, 7), NVRTC_12_8, "compute_120"),
        ("90", None, NVRTC_12_4, "sm_90"),
        ("120", None, NVRTC_12_4, "compute_90"),
    ],
)
def test_target(arch: str, device: tuple[int, int] | None, supported: tuple[int, ...], expected: str) -> None:
    assert select_target(arch, device, supported).option == f"-arch={expected}"


@pytest.mark.parametrize(("arch", "expected"), [("75", "compute_75"), ("80", "compute_80"), ("90", "compute_90")])
def test_a_forced_architecture_is_ptx_whatever_the_device(arch: str, expected: str) -> None:
    assert select_target(arch, (9, 0), NVRTC_13, forced=True).option == f"-arch={expected}"


@pytest.mark.parametrize(
    ("arch", "device", "supported"),
    [
        ("90a", (10, 0), NVRTC_13),  # sm_90a code runs on 9.0 alone
        ("90a", (8, 0), NVRTC_13),
        ("90a", (9, 0), (75, 80)),  # and has no substitute
        ("120", (9, 0), NVRTC_13),  # newer than the device
        ("75", (7, 5), (80, 90)),  # an NVRTC that has dropped the device
    ],
)
def test_what_cannot_run_is_refused(arch: str, device: tuple[int, int], supported: tuple[int, ...]) -> None:
    with pytest.raises(CompilationError, match=f"sm_{arch}"):
        select_target(arch, device, supported)


@pytest.mark.parametrize("arch", ["75", "80", "86", "89", "90", "90a", "100", "120"])
def test_a_cubin_is_whole(root: Path, arch: str) -> None:
    """CuPy's binding drops the last byte: the tables stated in an ELF header must end where the file does."""
    if int(arch.removesuffix("a")) not in compiler.supported_archs():
        pytest.skip(f"NVRTC {compiler.nvrtc_version()} does not know sm_{arch}")
    compiled = compile_tiny(arch)
    cubin = compiled.cubin
    assert cubin[:4] == b"\x7fELF"
    program_table, section_table = struct.unpack_from("<QQ", cubin, 32)
    program_size, programs, section_size, sections = struct.unpack_from("<HHHH", cubin, 54)
    ends = (program_table + program_size * programs, section_table + section_size * sections)
    assert len(cubin) == max(ends)
    assert tiny_config(arch).name.encode() in cubin
    assert f"'sm_{arch}'" in compiled.log


def test_ptx_is_text_for_its_architecture(root: Path) -> None:
    target = select_target("120", (99, 0), compiler.supported_archs())
    compiled = compile_tiny(target)
    assert target.form == "ptx"
    assert f".target sm_{max(compiler.supported_archs())}" in compiled.cubin.decode()
    assert compiler.resource_usage(compiled.log) is None


class TestResources:
    def test_of_a_small_kernel(self, root: Path) -> None:
        used = compiler.resource_usage(compile_tiny("80").log)
        assert used is not None
        assert 4 <= used.registers <= 32
        assert (used.spill_bytes, used.stack_bytes, used.shared_bytes) == (0, 0, 0)

    def test_of_a_kernel_that_spills_and_has_shared_memory(self, root: Path) -> None:
        """64 values live at once in 32 registers, and 64 x 33 floats shared."""
        (root / "tiny/spill.cuh").write_text("""
            #include "tiny/scale.cuh"
            namespace hfc {
            template <class Config> __device__ void spill(const TinyParams& params) {
              __shared__ float tile[64 * 33];
              float values[64];
              for (int i = 0; i < 64; ++i) values[i] = params.view.in[threadIdx.x + 1024 * i];
              for (int i = 0; i < 64; ++i) tile[(i * 97 + threadIdx.x) % (64 * 33)] = values[i];
              __syncthreads();
              for (int i = 0; i < 64; ++i) {
                params.view.out[threadIdx.x + 1024 * i] = values[i] * tile[i] + values[63 - i];
              }
            }
            }
        """)
        config = {"kernel": "spill", "include": "tiny/spill.cuh", "num_threads": 1024, "min_blocks": 2}
        used = compiler.resource_usage(compile_tiny("80", **config).log)
        assert used is not None
        assert used.registers <= 32
        assert used.spill_bytes > 0
        assert used.stack_bytes > 0
        assert used.shared_bytes == 64 * 33 * 4

    def test_adds_up_what_functions_spill(self) -> None:
        log = """
ptxas info    : Function properties for helper
ptxas         .     16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
ptxas info    : Compiling entry function 'kernel' for 'sm_80'
    48 bytes stack frame, 96 bytes spill stores, 100 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 48 bytes cumulative stack size, 1024 bytes smem
"""
        assert compiler.resource_usage(log) == compiler.Resources(255, 208, 48, 1024)


class TestErrors:
    def test_nvrtc_s_messages_come_with_the_kernel_and_the_architecture(self, root: Path) -> None:
        path = root / "tiny/scale.cuh"
        path.write_text(path.read_text().replace("params.shift", "params.shfit"))
        with pytest.raises(CompilationError) as refused:
            compile_tiny("80")
        for expected in ("tiny_scale_x3_sm80", "sm_80", "shfit", "scale.cuh"):
            assert expected in str(refused.value)

    def test_no_cupy_names_the_extra(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "cupy", None)
        with pytest.raises(MissingDependency) as missing:
            compiler.import_cupy()
        assert missing.value.mend.startswith("pip install 'hf-flash-cupy[cuda1")

    def test_no_nvrtc_names_the_wheel(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from cupy_backends.cuda.libs import nvrtc

        def fail() -> None:
            raise RuntimeError("CuPy failed to load libnvrtc.so")

        monkeypatch.setattr(nvrtc, "getVersion", fail)
        compiler._nvrtc.cache_clear()
        with pytest.raises(MissingDependency) as missing:
            compiler.nvrtc_version()
        assert missing.value.mend.startswith("pip install nvidia-cuda-nvrtc")


def test_files_of_the_current_folder_are_not_included(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "scale.cuh").write_text("#error the user's own file\n")
    monkeypatch.chdir(tmp_path)
    assert compile_tiny("80").cubin[:4] == b"\x7fELF"


def test_no_cuda_header_is_within_reach(root: Path) -> None:
    """J01: the include folders are ours alone, and a CUDA header is found in none of them."""
    (root / "tiny/header.cuh").write_text('#include "tiny/scale.cuh"\n#include <cuda_fp16.h>\n')
    assert all(folder.is_relative_to(root) for folder in source.include_dirs("cuda"))
    assert not any(option.startswith(("-I", "--include")) for option in compiler.options(Target("80", "cubin")))
    with pytest.raises(CompilationError, match=r"cuda_fp16\.h"):
        compile_tiny("80", include="tiny/header.cuh")


@pytest.mark.parametrize("variable", ["HOME", "CUPY_CACHE_DIR"])
def test_cupy_is_imported_where_it_can_make_no_folder(root: Path, tmp_path: Path, variable: str) -> None:
    """J03: ``import cupy`` alone raises there."""
    program = """
import json, pathlib, sys
from jit_fixture import tiny_config
from hf_flash_cupy.jit import compiler, module
assert "cupy" not in sys.modules
entry = module.ensure_cached(tiny_config("80"))
whole = entry.binary.read_bytes()[:4] == bytes([127, 69, 76, 70])
print(json.dumps({"whole": whole, "cupy": "cupy" in sys.modules}))
"""
    variables = {"HOME": "/proc/nohome", variable: "/proc/nohome"}
    report = run_child(root, tmp_path / "cache", program=program, **variables)
    assert report == {"whole": True, "cupy": True}
