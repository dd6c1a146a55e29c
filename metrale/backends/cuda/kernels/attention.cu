// K/V pages and attention over them. Pages are (blocks, heads, BLOCK_TOKENS, dim) of T.
//
// Variants:  T
// Launch:    kv_write: one thread an element; kv_zero, kv_copy: one block a page; attention: one block of 128 threads a
//            (row, query head).
// Shared:    attention: 2 dim + BLOCK_TOKENS floats (query, sums, scores).
// Numerics:  float32; online softmax over blocks in ascending order. Places past a row's index and before its window are
//            never read.
// Source:    Milakov and Gimelshein 2018 (online softmax)

#include "numbers.cuh"
#include "reduce.cuh"

// k, v (T, heads, dim) -> pages; padding rows write block 0
KERNEL(kv_write)(T *k_pages, T *v_pages, const T *k, const T *v, const int *seq, const int *index, const int *tables,
                 i64 count, int heads, int dim, int blocks, int sequences, int max_blocks, i64 k_row, i64 k_head, i64 v_row,
                 i64 v_head) {
    const i64 i = thread_number();
    if (i >= count) return;
    const int d = i % dim, head = i / dim % heads;
    const i64 t = i / dim / heads;
    const int row = seq[t], place = index[t];
    int block = 0;
    if (row >= 0) {
        if (row >= sequences || place < 0 || place / BLOCK_TOKENS >= max_blocks) return;
        block = tables[static_cast<i64>(row) * max_blocks + place / BLOCK_TOKENS];
        if (block < 0 || block >= blocks) return;
    }
    const i64 to = ((static_cast<i64>(block) * heads + head) * BLOCK_TOKENS + (place & (BLOCK_TOKENS - 1))) * dim + d;
    k_pages[to] = k[t * k_row + head * k_head + d];
    v_pages[to] = v[t * v_row + head * v_head + d];
}

// blocks_in (M,): pages to zero, -1 skips
KERNEL(kv_zero)(T *k_pages, T *v_pages, const int *blocks_in, int blocks, i64 page) {
    const int block = blocks_in[blockIdx.x];
    if (block < 0 || block >= blocks) return;
    for (i64 i = threadIdx.x; i < page; i += blockDim.x) {
        put(k_pages + block * page + i, 0.0f);
        put(v_pages + block * page + i, 0.0f);
    }
}

// src, dst (M,): pages to copy, -1 skips; no page is both a source and a destination
KERNEL(kv_copy)(T *k_pages, T *v_pages, const int *src, const int *dst, int blocks, i64 page) {
    const int from = src[blockIdx.x], to = dst[blockIdx.x];
    if (from < 0 || from >= blocks || to < 0 || to >= blocks) return;
    for (i64 i = threadIdx.x; i < page; i += blockDim.x) {
        k_pages[to * page + i] = k_pages[from * page + i];
        v_pages[to * page + i] = v_pages[from * page + i];
    }
}

// out, q (T, query_heads, dim); window 0: none; cap 0: none; tables (sequences, max_blocks)
KERNEL(attention)(T *out, const T *q, const T *k_pages, const T *v_pages, const int *seq, const int *index,
                  const int *tables, int query_heads, int heads, int dim, int blocks, int sequences, int max_blocks,
                  i64 out_row, i64 out_head, i64 q_row, i64 q_head, float scale, int window, float cap) {
    extern __shared__ float shared[];
    float *query = shared, *sums = shared + dim, *scores = shared + 2 * dim;
    const i64 t = blockIdx.x / query_heads;
    const int query_head = blockIdx.x % query_heads, head = query_head / (query_heads / heads);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    out += t * out_row + query_head * out_head;
    q += t * q_row + query_head * q_head;
    const int row = seq[t];
    if (row < 0 || row >= sequences) {
        for (int d = threadIdx.x; d < dim; d += blockDim.x) put(out + d, 0.0f);
        return;
    }
    for (int d = threadIdx.x; d < dim; d += blockDim.x) {  // a thread owns the same d in both arrays throughout
        query[d] = to_float(q[d]);
        sums[d] = 0.0f;
    }
    const int last = min(index[t], max_blocks * BLOCK_TOKENS - 1);
    const int first = window > 0 ? max(0, last - window + 1) : 0;
    float highest = -infinity(), total = 0.0f;
    for (int place = first; place <= last;) {
        const int block = tables[static_cast<i64>(row) * max_blocks + place / BLOCK_TOKENS];
        const int begin = place % BLOCK_TOKENS, many = min(BLOCK_TOKENS - begin, last - place + 1);
        place += many;
        if (block < 0 || block >= blocks) continue;
        const i64 at = ((static_cast<i64>(block) * heads + head) * BLOCK_TOKENS + begin) * dim;
        __syncthreads();  // the query is there; nobody reads the last scores any more
        for (int j = warp; j < many; j += warps) {
            float score = 0.0f;
            for (int d = lane; d < dim; d += 32) score += query[d] * to_float(k_pages[at + j * dim + d]);
            score = warp_reduce(score, Sum()) * scale;
            if (cap > 0.0f) score = cap * tanhf(score / cap);
            if (lane == 0) scores[j] = score;
        }
        __syncthreads();
        float top = highest;
        for (int j = 0; j < many; ++j) top = fmaxf(top, scores[j]);
        const float shrink = top == highest ? 1.0f : expf(highest - top);
        total *= shrink;
        for (int d = threadIdx.x; d < dim; d += blockDim.x) sums[d] *= shrink;
        for (int j = 0; j < many; ++j) {
            const float weight = expf(scores[j] - top);
            total += weight;
            for (int d = threadIdx.x; d < dim; d += blockDim.x) sums[d] += weight * to_float(v_pages[at + j * dim + d]);
        }
        highest = top;
    }
    for (int d = threadIdx.x; d < dim; d += blockDim.x) put(out + d, sums[d] / total);
}
