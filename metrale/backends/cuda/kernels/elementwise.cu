// Elementwise ops: add, scale, softcap, act_mul, quantize, gather_rows.
//
// Variants:  T; `_f32` entry points read (or change) float32 where the plain ones take T, for products that are rounded
//            only once and for logits; `_q` entry points write a QTensor.
// Launch:    one thread an element, or one warp a block of 32 where a QTensor is written.
// Numerics:  float32 inside, one rounding at the end.

#include "numbers.cuh"
#include "reduce.cuh"
#include "quantize.cuh"

// residual (rows, width) += x (rows, width)
template <class X>
__device__ void add_rows(T *residual, const X *x, i64 count, int width, i64 residual_row, i64 x_row) {
    const i64 i = thread_number();
    if (i >= count) return;
    T *to = residual + i / width * residual_row + i % width;
    put(to, to_float(*to) + to_float(x[i / width * x_row + i % width]));
}

KERNEL(add)(T *residual, const T *x, i64 count, int width, i64 residual_row, i64 x_row) {
    add_rows(residual, x, count, width, residual_row, x_row);
}

KERNEL(add_f32)(T *residual, const float *x, i64 count, int width, i64 residual_row, i64 x_row) {
    add_rows(residual, x, count, width, residual_row, x_row);
}

// x (rows, width) *= factor
template <class X> __device__ void scale_rows(X *x, i64 count, int width, i64 x_row, float factor) {
    const i64 i = thread_number();
    if (i >= count) return;
    X *at = x + i / width * x_row + i % width;
    put(at, to_float(*at) * factor);
}

KERNEL(scale)(T *x, i64 count, int width, i64 x_row, float factor) { scale_rows(x, count, width, x_row, factor); }

KERNEL(scale_f32)(float *x, i64 count, int width, i64 x_row, float factor) { scale_rows(x, count, width, x_row, factor); }

// x (rows, width) = cap * tanh(x / cap)
template <class X> __device__ void softcap_rows(X *x, i64 count, int width, i64 x_row, float cap) {
    const i64 i = thread_number();
    if (i >= count) return;
    X *at = x + i / width * x_row + i % width;
    put(at, cap * tanhf(to_float(*at) / cap));
}

KERNEL(softcap)(T *x, i64 count, int width, i64 x_row, float cap) { softcap_rows(x, count, width, x_row, cap); }

KERNEL(softcap_f32)(float *x, i64 count, int width, i64 x_row, float cap) { softcap_rows(x, count, width, x_row, cap); }

// act 0: silu; 1: the tanh form of GELU (Hendrycks and Gimpel 2016)
__device__ inline float activated(float x, int act) {
    if (act == 0) return x / (1.0f + expf(-x));
    return 0.5f * x * (1.0f + tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x)));
}

// Element i of act(gate) * up; gate_up (rows, 2 width): gates, then ups.
template <class X> __device__ inline float gated(const X *gate_up, i64 i, int width, i64 gate_up_row, int act) {
    const X *row = gate_up + i / width * gate_up_row + i % width;
    return activated(to_float(row[0]), act) * to_float(row[width]);
}

// out (rows, width)
KERNEL(act_mul)(T *out, const T *gate_up, i64 count, int width, i64 out_row, i64 gate_up_row, int act) {
    const i64 i = thread_number();
    if (i < count) put(out + i / width * out_row + i % width, gated(gate_up, i, width, gate_up_row, act));
}

KERNEL(act_mul_f32)(T *out, const float *gate_up, i64 count, int width, i64 out_row, i64 gate_up_row, int act) {
    const i64 i = thread_number();
    if (i < count) put(out + i / width * out_row + i % width, gated(gate_up, i, width, gate_up_row, act));
}

// data (rows, width), scales (rows, width / 32), sums (rows, width / 16). count and the block size are multiples of 32, so
// that a warp leaves or stays as a whole.
template <class X>
__device__ void act_mul_to_q(i8 *data, float *scales, i16 *sums, const X *gate_up, i64 count, int width, i64 gate_up_row,
                             int act) {
    const i64 i = thread_number(), block = i / 32;
    if (i >= count) return;
    quantize_32(gated(gate_up, i, width, gate_up_row, act), data + 32 * block, scales + block, sums + 2 * block);
}

KERNEL(act_mul_q)(i8 *data, float *scales, i16 *sums, const T *gate_up, i64 count, int width, i64 gate_up_row, int act) {
    act_mul_to_q(data, scales, sums, gate_up, count, width, gate_up_row, act);
}

KERNEL(act_mul_q_f32)(i8 *data, float *scales, i16 *sums, const float *gate_up, i64 count, int width, i64 gate_up_row,
                      int act) {
    act_mul_to_q(data, scales, sums, gate_up, count, width, gate_up_row, act);
}

// x (rows, width)
KERNEL(quantize)(i8 *data, float *scales, i16 *sums, const T *x, i64 count, int width, i64 x_row) {
    const i64 i = thread_number(), block = i / 32;
    if (i >= count) return;
    quantize_32(to_float(x[i / width * x_row + i % width]), data + 32 * block, scales + block, sums + 2 * block);
}

// x (rows, width) less the values of q (rows, width)
KERNEL(quantize_rest)(i8 *data, float *scales, i16 *sums, const T *x, const i8 *q, const float *q_scales, i64 count, int width,
                      i64 x_row) {
    const i64 i = thread_number(), block = i / 32;
    if (i >= count) return;
    const float rest = __fsub_rn(to_float(x[i / width * x_row + i % width]), __fmul_rn(q[i], q_scales[block]));
    quantize_32(rest, data + 32 * block, scales + block, sums + 2 * block);
}

// out (count / width, width) = x[rows]; a row of -1 copies nothing; without `rows` row i is row i.
template <class X>
__device__ void gather(X *out, const X *x, const int *rows, i64 count, int width, int x_rows, i64 out_row, i64 x_row) {
    const i64 i = thread_number();
    if (i >= count) return;
    const i64 from = rows == nullptr ? i / width : rows[i / width];
    if (from >= 0 && from < x_rows) out[i / width * out_row + i % width] = x[from * x_row + i % width];
}

KERNEL(gather_rows_2)(u16 *out, const u16 *x, const int *rows, i64 count, int width, int x_rows, i64 out_row, i64 x_row) {
    gather(out, x, rows, count, width, x_rows, out_row, x_row);
}

KERNEL(gather_rows_4)(u32 *out, const u32 *x, const int *rows, i64 count, int width, int x_rows, i64 out_row, i64 x_row) {
    gather(out, x, rows, count, width, x_rows, out_row, x_row);
}
