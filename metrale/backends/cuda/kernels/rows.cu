// The row state and its rings. Layout: metrale/backends/base.py, RowLayout; offsets come from there as arguments.
//
// Variants:  none
// Launch:    rows_patch and publish: one block; the others: one thread a step row.
// Order:     everything that changes between replays (cursors, counts, orders) is read from memory.

#include "numbers.cuh"

// words (num_words,); entries (depth, 2 + 2 capacity) in pinned memory; cursor (1,)
KERNEL(rows_patch)(int *words, volatile int *entries, int *cursor, i64 num_words, int depth, int capacity) {
    __shared__ int pairs[2 * 256];
    volatile int *entry = entries + static_cast<i64>(*cursor % depth) * (2 + 2 * capacity);
    const int count = min(entry[0], capacity);
    for (int start = 0; start < count; start += 256) {
        const int many = min(256, count - start);
        for (int i = threadIdx.x; i < 2 * many; i += blockDim.x) pairs[i] = entry[2 + 2 * start + i];
        __syncthreads();
        if (threadIdx.x == 0) {  // one thread: a later pair may name the word of an earlier one
            for (int i = 0; i < many; ++i) {
                const i64 offset = pairs[2 * i];
                if (offset >= 0 && offset < num_words) words[offset] = pairs[2 * i + 1];
            }
        }
        __syncthreads();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        entry[0] = 0;
        __threadfence_system();
        *cursor += 1;
    }
}

// order (T,) -> ids, seq, index, position (T,); fields (rows, NUM_FIELDS); history (rows, max_tokens)
KERNEL(rows_begin)(int *ids, int *seq, int *index, int *position, const int *order, int *fields, int *history, int count,
                   int rows, int max_tokens) {
    const int i = thread_number();
    if (i >= count) return;
    int row = order[i];
    if (row >= rows) row = -1;
    int token = 0, place = 0, delta = 0;
    if (row >= 0) {
        int *field = fields + static_cast<i64>(row) * NUM_FIELDS;
        if (field[FIELD_INDEX] >= field[FIELD_LIMIT]) {
            field[FIELD_FLAG] |= 1;
            row = -1;
        } else {
            token = field[FIELD_TOKEN];
            place = field[FIELD_INDEX];
            delta = field[FIELD_DELTA];
            if (place >= 0 && place < max_tokens) history[static_cast<i64>(row) * max_tokens + place] = token;
        }
    }
    ids[i] = token;
    seq[i] = row < 0 ? -1 : row;
    index[i] = place;
    position[i] = place + delta;
}

KERNEL(rows_prefill)(int *history, const int *ids, const int *seq, const int *index, int count, int rows, int max_tokens) {
    const int i = thread_number();
    if (i >= count || seq[i] < 0 || seq[i] >= rows || index[i] < 0 || index[i] >= max_tokens) return;
    history[static_cast<i64>(seq[i]) * max_tokens + index[i]] = ids[i];
}

KERNEL(rows_commit)(int *fields, const int *ids, const int *seq, const int *index, int count, int rows) {
    const int i = thread_number();
    if (i >= count || seq[i] < 0 || seq[i] >= rows) return;
    int *field = fields + static_cast<i64>(seq[i]) * NUM_FIELDS;
    field[FIELD_TOKEN] = ids[i];
    field[FIELD_INDEX] = index[i] + 1;
}

// header (depth, 4) and ring_ids (depth, rows) in pinned memory; cursor (1,); ids (count,); fields (rows, NUM_FIELDS)
KERNEL(publish)(volatile int *header, volatile int *ring_ids, int *cursor, const int *ids, const int *fields, int count,
                int rows, int depth) {
    __shared__ int flags;
    const int number = *cursor, entry = number % depth;
    if (threadIdx.x == 0) flags = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += blockDim.x) ring_ids[static_cast<i64>(entry) * rows + i] = ids[i];
    for (int i = threadIdx.x; i < rows; i += blockDim.x) {
        const int flag = fields[static_cast<i64>(i) * NUM_FIELDS + FIELD_FLAG];
        if (flag != 0) atomicOr(&flags, flag);
    }
    __threadfence_system();  // each thread's ids before the barrier, and so before the number below
    __syncthreads();
    if (threadIdx.x == 0) {
        header[4 * entry + 1] = count;
        header[4 * entry + 2] = flags;
        __threadfence_system();
        header[4 * entry] = number;
        __threadfence_system();
        *cursor = number + 1;
    }
}
