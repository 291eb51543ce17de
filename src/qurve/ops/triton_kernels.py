"""The Triton kernels of the bottleneck's head, forward and backward. `triton_head` launches them and says what they do.

Types, shapes and strides are as the launching functions give them; rows are tokens. A pointer that is None stands for
something that this head does not have, or that nobody wants.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Whether the kernels run in Triton's interpreter, which (in 3.7) multiplies the bit patterns of bfloat16 numbers, and
cuts off where hardware rounds to the nearest."""

# --------------------------------------------------------------------------------------------------------------- parts


@triton.jit
def _rounded(x, dtype: tl.constexpr):
    """float32 in another dtype, rounded to the nearest."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = bits.to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def _product(a, b, added):
    """`a b + added`, with sums in float32."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, added, input_precision="ieee")


@triton.jit
def _moments(x_ptr, rows, in_range, stride, eps, D_IN: tl.constexpr, BLOCK_D: tl.constexpr, PRE: tl.constexpr):
    """Each row's mean (0 but for a layer norm) and its inverse deviation."""
    mean = tl.zeros_like(rows).to(tl.float32)
    if PRE == "layernorm":
        for start in range(0, D_IN, BLOCK_D):
            cols = start + tl.arange(0, BLOCK_D)
            seen = in_range[:, None] & (cols < D_IN)[None, :]
            x = tl.load(x_ptr + rows[:, None] * stride + cols[None, :], mask=seen, other=0.0)
            mean += tl.sum(x.to(tl.float32), 1)
        mean = mean / D_IN
    square = tl.zeros_like(rows).to(tl.float32)
    for start in range(0, D_IN, BLOCK_D):
        cols = start + tl.arange(0, BLOCK_D)
        seen = in_range[:, None] & (cols < D_IN)[None, :]
        x = tl.load(x_ptr + rows[:, None] * stride + cols[None, :], mask=seen, other=0.0)
        centred = tl.where(seen, x.to(tl.float32) - mean[:, None], 0.0)
        square += tl.sum(centred * centred, 1)
    return mean, 1.0 / tl.sqrt(square / D_IN + eps)


@triton.jit
def _post_moments(y, seen, eps, D_OUT: tl.constexpr, POST: tl.constexpr):
    """The normalised rows and the inverse deviations of `y`, the whole rows of which are here."""
    if POST == "layernorm":
        y = tl.where(seen, y - (tl.sum(y, 1) / D_OUT)[:, None], 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(y * y, 1) / D_OUT + eps)
    return y * inverse[:, None], inverse


@triton.jit
def _activate(z, KIND: tl.constexpr):
    if KIND == "gelu":
        return 0.5 * z * (1.0 + tl.erf(z * 0.7071067811865476))
    if KIND == "relu":
        return tl.where(z < 0, 0.0, z)  # NaN stays NaN
    if KIND == "relu2":
        positive = tl.where(z < 0, 0.0, z)
        return positive * positive
    if KIND == "silu":
        return z * tl.sigmoid(z)
    return z


@triton.jit
def _slope(z, KIND: tl.constexpr):
    """The activation's derivative."""
    if KIND == "gelu":
        density = 0.3989422804014327 * tl.exp(-0.5 * z * z)
        return 0.5 * (1.0 + tl.erf(z * 0.7071067811865476)) + z * density
    if KIND == "relu":
        return tl.where(z <= 0, 0.0, 1.0)
    if KIND == "relu2":
        return 2.0 * tl.where(z < 0, 0.0, z)
    if KIND == "silu":
        sigmoid = tl.sigmoid(z)
        return sigmoid * (1.0 + z * (1.0 - sigmoid))
    return tl.full(z.shape, 1.0, tl.float32)


# ------------------------------------------------------------------------------------------------------------- kernels


@triton.jit
def forward_kernel(
    s_ptr, x_ptr, w2_ptr, b1_ptr, b2_ptr, gain_ptr, offset_ptr, anchor_ptr, out_ptr, y_ptr,
    N, s_stride, x_stride, anchor_stride, eps, scale,
    D_IN: tl.constexpr, RANK: tl.constexpr, D_OUT: tl.constexpr,
    ACTIVATION: tl.constexpr, PRE: tl.constexpr, POST: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_O: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_range = rows < N
    outs = tl.arange(0, BLOCK_O)
    in_out = outs < D_OUT
    seen = in_range[:, None] & in_out[None, :]
    if PRE != "none":
        _, inverse = _moments(x_ptr, rows, in_range, x_stride, eps, D_IN, BLOCK_D, PRE)

    y = tl.zeros([BLOCK_N, BLOCK_O], tl.float32)
    for start in range(0, RANK, BLOCK_R):
        units = start + tl.arange(0, BLOCK_R)
        in_units = units < RANK
        z = tl.load(
            s_ptr + rows[:, None] * s_stride + units[None, :], mask=in_range[:, None] & in_units[None, :], other=0.0
        ).to(tl.float32)
        if PRE != "none":
            z = z * inverse[:, None]
        if b1_ptr is not None:
            z += tl.load(b1_ptr + units, mask=in_units, other=0.0).to(tl.float32)[None, :]
        w2 = tl.load(
            w2_ptr + outs[None, :] * RANK + units[:, None], mask=in_out[None, :] & in_units[:, None], other=0.0
        )
        y = _product(_rounded(_activate(z, ACTIVATION), w2.dtype), w2, y)
    if b2_ptr is not None:
        y += tl.load(b2_ptr + outs, mask=in_out, other=0.0).to(tl.float32)[None, :]
    if y_ptr is not None:
        tl.store(y_ptr + rows[:, None] * D_OUT + outs[None, :], _rounded(y, y_ptr.dtype.element_ty), mask=seen)

    if POST != "none":
        y, _ = _post_moments(y, seen, eps, D_OUT, POST)
        y *= tl.load(gain_ptr + outs, mask=in_out, other=0.0).to(tl.float32)[None, :]
    if offset_ptr is not None:
        y += tl.load(offset_ptr + outs, mask=in_out, other=0.0).to(tl.float32)[None, :]
    if anchor_ptr is not None:
        y += tl.load(anchor_ptr + rows[:, None] * anchor_stride + outs[None, :], mask=seen, other=0.0).to(tl.float32)
    tl.store(out_ptr + rows[:, None] * D_OUT + outs[None, :], _rounded(scale * y, out_ptr.dtype.element_ty), mask=seen)


@triton.jit
def backward_kernel(
    g_ptr, s_ptr, x_ptr, w2_ptr, b1_ptr, gain_ptr, y_ptr,
    dy_ptr, h_ptr, ds_ptr, dx_ptr, danchor_ptr, db1_ptr, db2_ptr, dgain_ptr, doffset_ptr,
    N, s_stride, x_stride, eps, scale,
    D_IN: tl.constexpr, RANK: tl.constexpr, D_OUT: tl.constexpr,
    ACTIVATION: tl.constexpr, PRE: tl.constexpr, POST: tl.constexpr, ON_IDENTITY: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_O: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    rows = program * BLOCK_N + tl.arange(0, BLOCK_N)
    in_range = rows < N
    outs = tl.arange(0, BLOCK_O)
    in_out = outs < D_OUT
    seen = in_range[:, None] & in_out[None, :]

    # From the output to y, in whole rows.
    dy = scale * tl.load(g_ptr + rows[:, None] * D_OUT + outs[None, :], mask=seen, other=0.0).to(tl.float32)
    if danchor_ptr is not None:
        tl.store(
            danchor_ptr + rows[:, None] * D_OUT + outs[None, :], _rounded(dy, danchor_ptr.dtype.element_ty), mask=seen
        )
    if doffset_ptr is not None:
        tl.store(doffset_ptr + program * D_OUT + outs, tl.sum(dy, 0), mask=in_out)
    if POST != "none":
        y = tl.load(y_ptr + rows[:, None] * D_OUT + outs[None, :], mask=seen, other=0.0).to(tl.float32)
        y, y_inverse = _post_moments(y, seen, eps, D_OUT, POST)
        tl.store(dgain_ptr + program * D_OUT + outs, tl.sum(dy * y, 0), mask=in_out)
        dy *= tl.load(gain_ptr + outs, mask=in_out, other=0.0).to(tl.float32)[None, :]
        along = tl.sum(dy * y, 1) / D_OUT
        if POST == "layernorm":
            dy -= (tl.sum(dy, 1) / D_OUT)[:, None]
        dy = tl.where(seen, (dy - y * along[:, None]) * y_inverse[:, None], 0.0)
    if db2_ptr is not None:
        tl.store(db2_ptr + program * D_OUT + outs, tl.sum(dy, 0), mask=in_out)
    dy = _rounded(dy, dy_ptr.dtype.element_ty)
    tl.store(dy_ptr + rows[:, None] * D_OUT + outs[None, :], dy, mask=seen)

    # Through W2 and the activation, a few units at a time.
    if PRE != "none":
        mean, inverse = _moments(x_ptr, rows, in_range, x_stride, eps, D_IN, BLOCK_D, PRE)
        dinverse = tl.zeros([BLOCK_N], tl.float32)
    for start in range(0, RANK, BLOCK_R):
        units = start + tl.arange(0, BLOCK_R)
        in_units = units < RANK
        here = in_range[:, None] & in_units[None, :]
        s = tl.load(s_ptr + rows[:, None] * s_stride + units[None, :], mask=here, other=0.0).to(tl.float32)
        z = s
        if PRE != "none":
            z = s * inverse[:, None]
        if b1_ptr is not None:
            z += tl.load(b1_ptr + units, mask=in_units, other=0.0).to(tl.float32)[None, :]
        w2 = tl.load(
            w2_ptr + outs[:, None] * RANK + units[None, :], mask=in_out[:, None] & in_units[None, :], other=0.0
        )
        dz = _product(dy, w2, tl.zeros([BLOCK_N, BLOCK_R], tl.float32)) * _slope(z, ACTIVATION)
        h = _activate(z, ACTIVATION)
        tl.store(h_ptr + rows[:, None] * RANK + units[None, :], _rounded(h, h_ptr.dtype.element_ty), mask=here)
        if db1_ptr is not None:
            tl.store(db1_ptr + program * RANK + units, tl.sum(dz, 0), mask=in_units)
        if PRE != "none":
            dinverse += tl.sum(dz * s, 1)
            dz = dz * inverse[:, None]
        tl.store(ds_ptr + rows[:, None] * RANK + units[None, :], _rounded(dz, ds_ptr.dtype.element_ty), mask=here)

    # To x: from the deviation that its row was divided by, and from the anchor.
    if dx_ptr is not None:
        for start in range(0, D_IN, BLOCK_D):
            cols = start + tl.arange(0, BLOCK_D)
            here = in_range[:, None] & (cols < D_IN)[None, :]
            dx = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
            if PRE != "none":
                x = tl.load(x_ptr + rows[:, None] * x_stride + cols[None, :], mask=here, other=0.0).to(tl.float32)
                dx -= (x - mean[:, None]) * (dinverse * inverse * inverse * inverse / D_IN)[:, None]
            if ON_IDENTITY:
                dx += scale * tl.load(g_ptr + rows[:, None] * D_OUT + cols[None, :], mask=here, other=0.0).to(
                    tl.float32
                )
            tl.store(dx_ptr + rows[:, None] * D_IN + cols[None, :], _rounded(dx, dx_ptr.dtype.element_ty), mask=here)
