// Rotary position embedding of queries or keys, rotate-half layout.
//
// Variants:  T
// Launch:    one thread a pair (t, head, i).
// Numerics:  float32 inside. A position outside the table gives NaN.
// Source:    Su et al. 2021

#include "numbers.cuh"

// x (rows, heads, at least 2 half) in place; table (positions, 2 half): cosines, then sines; position (rows,)
KERNEL(rope)(T *x, const float *table, const int *position, i64 count, int heads, int half, int positions, i64 x_row,
             i64 x_head) {
    const i64 i = thread_number();
    if (i >= count) return;
    const int pair = i % half, head = i / half % heads;
    const i64 t = i / half / heads;
    T *first = x + t * x_row + head * x_head + pair, *second = first + half;
    const int place = position[t];
    float cosine = not_a_number(), sine = not_a_number();
    if (place >= 0 && place < positions) {
        cosine = table[static_cast<i64>(place) * 2 * half + pair];
        sine = table[static_cast<i64>(place) * 2 * half + half + pair];
    }
    const float a = to_float(*first), b = to_float(*second);
    put(first, a * cosine - b * sine);
    put(second, b * cosine + a * sine);
}
