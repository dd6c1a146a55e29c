// Sums, maxima and minima over a warp and over a block. The order is fixed, so equal inputs give equal bits.

struct Sum {
    template <class X> __device__ X operator()(X a, X b) const { return a + b; }
};
struct Max {
    template <class X> __device__ X operator()(X a, X b) const { return a > b ? a : b; }
};
struct Min {
    template <class X> __device__ X operator()(X a, X b) const { return a < b ? a : b; }
};

// All 32 lanes call it; all get the result.
template <class X, class Op> __device__ inline X warp_reduce(X value, Op op) {
    for (int offset = 16; offset > 0; offset /= 2) value = op(value, __shfl_xor_sync(FULL_WARP, value, offset));
    return value;
}

// All threads of the block call it (blockDim.x a multiple of 32); all get the result.
template <class X, class Op> __device__ inline X block_reduce(X value, Op op) {
    __shared__ X parts[32];
    value = warp_reduce(value, op);
    __syncthreads();  // readers of an earlier call are done
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
    __syncthreads();
    value = parts[0];
    for (int warp = 1; warp < static_cast<int>(blockDim.x) / 32; ++warp) value = op(value, parts[warp]);
    return value;
}
