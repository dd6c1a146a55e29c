// Rows of an embedding.
//
// Variants:  T; the weight's format is an argument.
// Launch:    one thread an element, once for each part of the weight; a part writes the ids it owns.
// Numerics:  float32, rounded once. An id outside the vocabulary gives a row of NaN.

#include "numbers.cuh"
#include "gguf.cuh"

// out (T, width); ids (T,); weight (n, row_bytes): rows start .. start + n of `total`
KERNEL(embed)(T *out, const int *ids, const u8 *weight, int format, i64 count, int width, int start, int n, int total,
              i64 row_bytes, i64 out_row, float scale) {
    const i64 i = thread_number();
    if (i >= count) return;
    T *to = out + i / width * out_row + i % width;
    const int id = ids[i / width];
    if (id >= start && id < start + n) {
        put(to, weight_at(format, weight + (id - start) * row_bytes, i % width) * scale);
    } else if (start == 0 && (id < 0 || id >= total)) {
        put(to, not_a_number());
    }
}
