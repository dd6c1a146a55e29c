// Int8 activations: the contract's `quantize`, one block of 32 values a warp.

// All 32 lanes call it, each with its value; data, scale and sums point at the block's own entries.
// Every operation rounds to float32 on its own: no fused multiply-add, so the result equals the reference's bit for bit.
__device__ inline void quantize_32(float x, i8 *data, float *scale, i16 *sums) {
    const int lane = threadIdx.x % 32;
    const float amax = warp_reduce(is_nan(x) ? 0.0f : fabsf(x), Max());
    const bool poisoned = __any_sync(FULL_WARP, is_nan(x));
    const float inverse = __fdiv_rn(127.0f, amax);
    const bool tiny = inverse == infinity();
    const bool usable = !poisoned && !tiny && amax < infinity();
    const int q = usable ? static_cast<int>(rintf(__fmul_rn(x, inverse))) : 0;
    int sum = q;
    for (int offset = 8; offset > 0; offset /= 2) sum += __shfl_xor_sync(FULL_WARP, sum, offset);
    data[lane] = static_cast<i8>(q);
    if (lane % 16 == 0) sums[lane / 16] = static_cast<i16>(sum);
    if (lane == 0) *scale = poisoned ? not_a_number() : tiny ? 0.0f : __fdiv_rn(amax, 127.0f);
}
