"""Reading what the compiler wrote: which functions there are, what they launch, allocate and pass on."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Launch:
    """One kernel that a function launches, and what it is given."""

    kernel: str
    args: tuple[str, ...]


@dataclass(frozen=True)
class Function:
    """A partition of the step, or a region that it calls for every layer."""

    name: str
    body: str

    @property
    def launches(self) -> list[Launch]:
        found = re.findall(r"(triton_\w+)\.run\((.*), stream=", self.body)
        return [Launch(kernel, tuple(args.split(", "))) for kernel, args in found]

    @property
    def library_calls(self) -> list[str]:
        return re.findall(r"extern_kernels\.(\w+)\(", self.body)

    @property
    def collectives(self) -> list[str]:
        """What it exchanges with other ranks, in order."""
        return re.findall(r"_c10d_functional\.(all_\w+?)_?\.default\(", self.body)

    @property
    def buffers(self) -> list[tuple[tuple[int, ...], str]]:
        """Shapes and dtypes of what it allocates."""
        found = re.findall(r"empty_strided_cuda\((\(.*?\)), \(.*?\), torch\.(\w+)\)", self.body)
        return [(tuple(map(int, re.findall(r"\d+", shape))), dtype) for shape, dtype in found]

    @property
    def host_lines(self) -> list[str]:
        """Lines that touch the host's memory."""
        return [
            line.strip() for line in self.body.splitlines() if re.search(r"cpu|\.item\(|\.tolist\(", line)
        ]

    def region_args(self, region: str) -> list[list[str]]:
        """What each call of a region is given."""
        lists = re.findall(rf"{region}_args = \[(.*)\]", self.body)
        one = r"(?:reinterpret_tensor\()?(\w+)(?:, \(.*?\), \(.*?\), \d+\))?(?:, |$)"
        return [re.findall(one, args) for args in lists]

    @property
    def parameters(self) -> list[str]:
        match = re.search(r"^    (.*) = args$", self.body, re.M)
        return [] if match is None else match[1].rstrip(",").split(", ")


@dataclass(frozen=True)
class Generated:
    """One generated module."""

    source: str

    @property
    def kernels(self) -> list[str]:
        return re.findall(r"^(\w+) = async_compile\.triton\(", self.source, re.M)

    def kernel(self, name: str) -> str:
        """A kernel's own source."""
        return self.source.split(f"\n{name} = async_compile.triton(", 1)[1].split("\n''', device_str=", 1)[0]

    @property
    def functions(self) -> dict[str, Function]:
        found = re.finditer(r"^def (\w+)\(args\):\n((?:    .*\n|\n)*)", self.source, re.M)
        return {match[1]: Function(match[1], match[2]) for match in found}

    @property
    def partitions(self) -> list[Function]:
        return [f for name, f in self.functions.items() if name.startswith("partition_")]

    @property
    def regions(self) -> list[Function]:
        return [f for name, f in self.functions.items() if "subgraph" in name]

    @property
    def inputs(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the module's inputs."""
        found = re.findall(r"(\w+) = rand_strided\((\(.*?\)), ", self.source)
        return {name: tuple(map(int, re.findall(r"\d+", shape))) for name, shape in found}

    def cache_tensors(self, function: Function, shape: tuple[int, ...]) -> set[str]:
        """The parameters of a function that are the K or V of a layer, which have this shape."""
        whole = {name for name, size in self.inputs.items() if size == shape}
        if function in self.partitions:
            return whole
        calls = [args for p in self.partitions for args in p.region_args(function.name)]
        return {
            name
            for args in calls
            for name, given in zip(function.parameters, args, strict=True)
            if given in whole
        }

    def largest_buffer(self) -> int:
        """Elements of the largest tensor that is allocated."""
        return max(math.prod(shape) for f in self.functions.values() for shape, _ in f.buffers)
