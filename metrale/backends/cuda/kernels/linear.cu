// Products with packed weights: out (T, n) = x (T, k) @ weight.T + bias, one part of a weight a launch.
//
// Variants:  T; the weight's format is an argument. `_to_f32` writes float32 where the plain ones write T; `_q` reads a
//            QTensor.
// Launch:    one warp an output, 4 outputs a block; blocks in y share the rows.
// Numerics:  float32 sums over k, a lane's own share first, then over the lanes: the same order for any number of rows.
//            With a QTensor the products inside a group of 32 are exact integers.

#include "numbers.cuh"
#include "reduce.cuh"
#include "gguf.cuh"

// x (rows, k); weight (n, row_bytes); bias (n,) or null
template <class Out>
__device__ void multiply(Out *out, const T *x, const u8 *weight, const float *bias, int format, int rows, int n, int k,
                         i64 row_bytes, i64 out_row, i64 x_row) {
    const int lane = threadIdx.x % 32;
    const i64 output = thread_number() / 32;
    if (output >= n) return;
    const u8 *row = weight + output * row_bytes;
    for (i64 t = blockIdx.y; t < rows; t += gridDim.y) {
        float sum = 0.0f;
#pragma unroll 1  // unrolled, the decoding of eight formats compiles ten times as long
        for (int i = lane; i < k; i += 32) sum += weight_at(format, row, i) * to_float(x[t * x_row + i]);
        sum = warp_reduce(sum, Sum());
        if (lane == 0) put(out + t * out_row + output, bias == nullptr ? sum : sum + bias[output]);
    }
}

KERNEL(linear)(T *out, const T *x, const u8 *weight, const float *bias, int format, int rows, int n, int k, i64 row_bytes,
               i64 out_row, i64 x_row) {
    multiply(out, x, weight, bias, format, rows, n, k, row_bytes, out_row, x_row);
}

KERNEL(linear_to_f32)(float *out, const T *x, const u8 *weight, const float *bias, int format, int rows, int n, int k,
                      i64 row_bytes, i64 out_row, i64 x_row) {
    multiply(out, x, weight, bias, format, rows, n, k, row_bytes, out_row, x_row);
}

// data (rows, k), scales (rows, k / 32), sums (rows, k / 16), without gaps
template <class Out>
__device__ void multiply_q(Out *out, const i8 *data, const float *scales, const i16 *sums, const u8 *weight,
                           const float *bias, int format, int rows, int n, int k, i64 row_bytes, i64 out_row) {
    const int lane = threadIdx.x % 32, groups = k / 32;
    const i64 output = thread_number() / 32;
    if (output >= n) return;
    const u8 *row = weight + output * row_bytes;
    for (i64 t = blockIdx.y; t < rows; t += gridDim.y) {
        float sum = 0.0f;
        for (int g = lane; g < groups; g += 32) {
            const i8 *x = data + t * k + 32 * g;
            int dot[2] = {0, 0};
#pragma unroll 1
            for (int i = 0; i < 32; ++i) dot[i / 16] += quant_at(format, row, g, i) * x[i];
            const Group group = group_at(format, row, g);
            const int x_sum = sums[(t * groups + g) * 2] + sums[(t * groups + g) * 2 + 1];
            const float product = group.scale[0] * dot[0] + group.scale[1] * dot[1] + group.minimum * x_sum;
            sum += scales[t * groups + g] * product;
        }
        sum = warp_reduce(sum, Sum());
        if (lane == 0) put(out + t * out_row + output, bias == nullptr ? sum : sum + bias[output]);
    }
}

KERNEL(linear_q)(T *out, const i8 *data, const float *scales, const i16 *sums, const u8 *weight, const float *bias,
                 int format, int rows, int n, int k, i64 row_bytes, i64 out_row) {
    multiply_q(out, data, scales, sums, weight, bias, format, rows, n, k, row_bytes, out_row);
}

KERNEL(linear_q_to_f32)(float *out, const i8 *data, const float *scales, const i16 *sums, const u8 *weight,
                        const float *bias, int format, int rows, int n, int k, i64 row_bytes, i64 out_row) {
    multiply_q(out, data, scales, sums, weight, bias, format, rows, n, k, row_bytes, out_row);
}
