"""A process that believes it has an H200, on a machine without any GPU: enough for `torch.compile` to lower
for CUDA with fake tensors and for Triton to compile what comes out. Nothing can be launched.

Private names of torch 2.13.0 and triton 3.7.1 throughout. Importing this module is what does it, before
anything else of torch is used. It cannot be undone: one process, one check.
"""

from __future__ import annotations

import ctypes
import os
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

CAPABILITY = (9, 0)
H200 = SimpleNamespace(
    name="NVIDIA H200",
    major=CAPABILITY[0],
    minor=CAPABILITY[1],
    total_memory=150 * 2**30,
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    L2_cache_size=60 * 2**20,
    is_integrated=0,
    is_multi_gpu_board=0,
    gcnArchName="",
    clock_rate=1980000,
    memory_clock_rate=3201000,
    memory_bus_width=6144,
    uuid="pretended",
)
DEVICE = torch.device("cuda", 0)

compiled: list[dict[str, Any]] = []
"""What Triton has compiled so far: each kernel's name, registers and bytes of local memory a thread."""


def install() -> None:
    _pretend_in_torch()
    _fold_constants_on_the_cpu()
    _pretend_in_triton()
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor

    functorch.enable_autograd_cache = False
    inductor.fx_graph_cache = False
    inductor.compile_threads = 1
    inductor.use_static_triton_launcher = False
    inductor.shape_padding = False  # would time matrix products on the device


def _always(value: Any) -> Any:
    return lambda *args, **kwargs: value


class _NoDevice:
    """A context manager in place of those that switch the current device."""

    def __init__(self, *args: Any) -> None: ...
    def __enter__(self) -> _NoDevice:
        return self

    def __exit__(self, *exception: Any) -> bool:
        return False


def _pretend_in_torch() -> None:
    torch._C._ensureCUDADeviceGuardSet()
    if not hasattr(torch._C, "_cuda_getDeviceCount"):
        # A build for CPUs has no guard for CUDA devices, which indexing a fake tensor asks for: lend it the
        # CPU's.
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        name = "_ZN3c104impl26device_guard_impl_registryE"
        guards = (ctypes.c_void_p * 2).in_dll(library, name)
        guards[1] = guards[1] or guards[0]
        torch._C._cuda_getDeviceCount = _always(1)  # type: ignore[attr-defined]
    answers: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "_is_compiled": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_properties": H200,
        "get_device_capability": CAPABILITY,
        "get_device_name": H200.name,
        "get_arch_list": ["sm_90"],
        "is_bf16_supported": True,
        "is_tf32_supported": True,
        "is_current_stream_capturing": False,
        "mem_get_info": (140 * 2**30, 150 * 2**30),
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "current_stream": SimpleNamespace(cuda_stream=0, stream_id=0, device_index=0, device_type=1),
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
    }
    nothing = (
        "_lazy_init",
        "init",
        "set_device",
        "synchronize",
        "empty_cache",
        "set_rng_state",
        "manual_seed",
    )
    for name, value in (answers | dict.fromkeys(nothing)).items():
        setattr(torch.cuda, name, _always(value))
    for name in ("device", "_DeviceGuard", "device_of"):
        setattr(torch.cuda, name, _NoDevice)
    for name in ("getCurrentRawStream", "getDevice", "exchangeDevice", "maybeExchangeDevice"):
        setattr(torch._C, f"_cuda_{name}", _always(0))
    torch._C._cuda_cudaCachingAllocator_is_enabled = _always(True)  # type: ignore[attr-defined]
    torch.version.cuda = torch.version.cuda or "13.0"
    from torch._subclasses import fake_tensor

    fake_tensor.FakeTensorMode.avoid_device_init = property(_always(True))  # type: ignore[assignment]
    fake_tensor.init_gpu_context = _always(None)


class _OnCpu(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def moved(value: Any) -> Any:
            is_cuda = isinstance(value, torch.device) and value.type == "cuda"
            return torch.device("cpu") if is_cuda else value

        return function(*tree_map(moved, args), **tree_map(moved, kwargs or {}))


def _fold_constants_on_the_cpu() -> None:
    """Constant folding runs small operations for real, on the device that is not there."""
    from torch._inductor.constant_folding import ConstantFolder
    from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder

    for folder in (ConstantFolder, UniformValueConstantFolder):
        if "_deduce_value" not in vars(folder):
            continue

        def deduce(self: Any, node: Any, original: Any = folder._deduce_value) -> Any:
            with _OnCpu():
                return original(self, node)

        folder._deduce_value = deduce


class _Utils:
    @staticmethod
    def get_device_properties(device: int) -> dict[str, int]:
        return {
            "max_shared_mem": 232448,
            "max_num_regs": 65536,
            "multiprocessor_count": H200.multi_processor_count,
            "warpSize": 32,
            "sm_clock_rate": H200.clock_rate,
            "mem_clock_rate": H200.memory_clock_rate,
            "mem_bus_width": H200.memory_bus_width,
        }

    @staticmethod
    def load_binary(name: str, cubin: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        usage = cubin_usage(cubin)
        compiled.append({"name": name, "shared": shared, **usage})
        return 0, 0, usage["registers"], usage["local"] // 4, 1024

    @staticmethod
    def unload_module(*args: Any) -> None: ...


class _Launcher:
    def __init__(self, source: Any, metadata: Any) -> None: ...
    def __call__(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("nothing can be launched on a GPU that is not there")


def _pretend_in_triton() -> None:
    import torch._inductor.runtime.triton_helpers as helpers
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    pretended = SimpleNamespace(
        utils=_Utils(),
        launcher_cls=_Launcher,
        get_current_device=_always(0),
        get_current_stream=_always(0),
        set_current_device=_always(None),
        get_device_capability=_always(CAPABILITY),
        is_active=_always(True),
        get_current_target=_always(GPUTarget("cuda", 10 * CAPABILITY[0] + CAPABILITY[1], 32)),
        get_active_torch_device=_always(DEVICE),
        get_device_interface=_always(torch.cuda),
        map_python_to_cpp_type=lambda name: name,
        get_benchmarker=_always(_always([1.0, 1.0, 1.0])),
    )
    driver.set_active(pretended)
    driver._default = driver.active
    helpers.set_driver_to_gpu = _always(None)


def cubin_usage(cubin: bytes) -> dict[str, int]:
    """Registers and bytes of local memory (where spilled registers go) of a compiled kernel, from the section
    `.nv.info` of its ELF file."""
    (section_table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", cubin, section_table + i * size) for i in range(count)]
    attributes = {0x2F: "registers", 0x11: "local"}
    usage = dict.fromkeys(attributes.values(), 0)
    for section in sections:
        name = sections[names][4] + section[0]
        if cubin[name : cubin.index(b"\0", name)] != b".nv.info":
            continue
        at, end = section[4], section[4] + section[5]
        while at < end:
            form, attribute, length = struct.unpack_from("<BBH", cubin, at)
            at += 4
            if form != 4:  # the length is the value
                continue
            if attribute in attributes:
                _, value = struct.unpack_from("<II", cubin, at)
                usage[attributes[attribute]] = max(usage[attributes[attribute]], value)
            at += length
    return usage


install()
