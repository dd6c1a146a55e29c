// Root-mean-square norms of rows, and of the heads of queries and keys.
//
// Variants:  T; `_q` writes a QTensor.
// Launch:    one block of 256 threads a row; a row is (t, head), with one head where the whole row is normalised.
// Shared:    32 partial sums.
// Numerics:  float32 inside; out may be x. With cast_first the quotient is rounded to T before the weight.
// Source:    Zhang and Sennrich 2019

#include "numbers.cuh"
#include "reduce.cuh"
#include "quantize.cuh"

// 1 / sqrt(mean(x^2) + eps) of one row; the whole block calls it.
__device__ inline float inverse_rms(const T *x, int width, float eps) {
    float sum = 0.0f;
    for (int i = threadIdx.x; i < width; i += blockDim.x) sum += to_float(x[i]) * to_float(x[i]);
    return 1.0f / sqrtf(block_reduce(sum, Sum()) / width + eps);
}

__device__ inline float normalised(T x, float inverse, float weight, float offset, int cast_first) {
    const float unit = to_float(x) * inverse;
    return (cast_first ? rounded<T>(unit) : unit) * (offset + weight);
}

// out, x (rows, heads, width); weight (width,)
KERNEL(rms_norm)(T *out, const T *x, const float *weight, int heads, int width, i64 out_row, i64 out_head, i64 x_row,
                 i64 x_head, float eps, float offset, int cast_first) {
    const i64 t = blockIdx.x / heads, head = blockIdx.x % heads;
    out += t * out_row + head * out_head;
    x += t * x_row + head * x_head;
    const float inverse = inverse_rms(x, width, eps);
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        put(out + i, normalised(x[i], inverse, weight[i], offset, cast_first));
    }
}

// data (rows, width), scales (rows, width / 32), sums (rows, width / 16); x (rows, width)
KERNEL(rms_norm_q)(i8 *data, float *scales, i16 *sums, const T *x, const float *weight, int width, i64 x_row, float eps,
                   float offset, int cast_first) {
    const i64 t = blockIdx.x;
    x += t * x_row;
    const float inverse = inverse_rms(x, width, eps);
    for (int i = threadIdx.x; i < width; i += blockDim.x) {  // whole warps: width is a multiple of 32
        const i64 block = (t * width + i) / 32;
        quantize_32(normalised(x[i], inverse, weight[i], offset, cast_first), data + 32 * block, scales + block,
                    sums + 2 * block);
    }
}
