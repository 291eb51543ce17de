"""Compile both kernels for a Hopper GPU, which need not be there, and print what they take of it as JSON lines.

Run as a process of its own, without Triton's interpreter: `test_hopper.py` does.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from qurve.ops.triton_head import blocks
from qurve.ops.triton_kernels import backward_kernel, forward_kernel

OPTIONAL = {"b1_ptr", "b2_ptr", "offset_ptr", "danchor_ptr", "db1_ptr", "db2_ptr", "doffset_ptr"}
IN_FLOAT32 = {"x_ptr", "dx_ptr", "gain_ptr", "anchor_ptr", "dgain_ptr", *OPTIONAL}


class Rule(NamedTuple):
    """What is compiled; the paper's layer by default."""

    activation: str = "gelu"
    pre_norm: str = "rmsnorm"
    post_norm: str = "layernorm"
    complete: bool = False
    """With biases, and a gradient for the anchor."""


VARIANTS = (
    Rule("relu", "layernorm", "rmsnorm", complete=True),
    Rule("relu2", "none", "none", complete=True),
    Rule("silu", "layernorm", "layernorm"),
    Rule("identity", "none", "none"),
)


def compiled(kernel: Any, d: int, dtype: torch.dtype, rule: Rule = Rule()) -> dict[str, Any]:  # noqa: B008
    """Under autocast: the block's input and the parameters in float32, products in `dtype`."""
    sizes = blocks(d, d, dtype)
    options = {name: sizes.pop(name) for name in ("num_warps", "num_stages")}
    constants: dict[str, Any] = {"D_IN": d, "RANK": d // 2, "D_OUT": d, "ACTIVATION": rule.activation, **sizes}
    constants |= {"PRE": rule.pre_norm, "POST": rule.post_norm, "ON_IDENTITY": not rule.complete}
    constants |= {} if rule.complete else dict.fromkeys(OPTIONAL)
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    half = "bf16" if dtype == torch.bfloat16 else "fp32"
    signature = {
        name: "constexpr"
        if name in constants
        else f"*{'fp32' if name in IN_FLOAT32 else half}"
        if name.endswith("_ptr")
        else "fp32"
        if name in ("eps", "scale")
        else "i32"
        for name in kernel.arg_names
    }
    at = {name: (i,) for i, name in enumerate(kernel.arg_names)}
    aligned = {at[name]: [["tt.divisibility", 16]] for name, kind in signature.items() if kind[0] in "*i"}
    source = ASTSource(kernel, signature, {at[name]: value for name, value in constants.items()}, aligned)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        tool = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        said = subprocess.run(tool, capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf"{word}:(\d+)", said)[1]) for word in ("REG", "STACK"))  # type: ignore[index]
    found = {"kernel": kernel.__name__, "d": d, "dtype": str(dtype), "rule": rule, "shared": made.metadata.shared}
    return {**found, "registers": registers, "stack": stack, "tensor_cores": "mma" in made.asm["ptx"]}


if __name__ == "__main__":
    for kernel in (forward_kernel, backward_kernel):
        for d in (384, 768, 1024):
            for dtype in (torch.bfloat16, torch.float32):
                print(json.dumps(compiled(kernel, d, dtype)), flush=True)
        for rule in VARIANTS:
            print(json.dumps(compiled(kernel, 768, torch.bfloat16, rule)), flush=True)
