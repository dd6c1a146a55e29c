/* Packed weights: panels of 16 output rows, k-major inside, the file's bits kept.
 *
 * A matrix of N rows and K inputs is ceil(N/16) panels; rows past N are zero. A panel is a run of records, one for 32
 * inputs. In a record the 32 inputs are 8 groups of 4; group g is 64 bytes, byte 4*r + j = row r, input 4*g + j: what
 * one 512-bit dot product (or two 256-bit ones) wants. Record and (every 8 records) super-block header, in bytes:
 *
 *   format  header        record
 *   q4_0                  qs 256, d 32
 *   q4_1                  qs 256, d 32, m 32
 *   q5_0                  qs 256, high 64, d 32
 *   q5_1                  qs 256, high 64, d 32, m 32
 *   q8_0                  q 512, d 32
 *   q4_k    d 32, dmin 32 qs 256, sc 16, mn 16
 *   q5_k    d 32, dmin 32 qs 256, high 64, sc 16, mn 16
 *   q6_k    d 32          qs 256, high 128, sc 32 (16 of the first 16 inputs, 16 of the others)
 *   f16, bf16             2 bytes, one record = one input of 16 rows
 *   f32                   4 bytes, likewise
 *
 * qs: low 4 bits, 64 bytes for two groups: low nibble = group 2p, high nibble = group 2p+1.
 * high (5 bits): bit g of byte 4*r + j = fifth bit of that input of group g.
 * high (6 bits): 64 bytes for groups 0-3 and 64 for 4-7: bits 2(g%4) and up = fifth and sixth bit.
 * d, m, dmin: 16 f16. sc, mn: the 6-bit scales unpacked to bytes (q6_k: int8 as stored).
 * Growth against the file: 0, q4_k 2.8%, q5_k 2.3%.
 *
 * Products with int8 rows. Per 32 inputs, a the quantized row, da its scale, q the stored unsigned bits (q8_0: signed),
 * every variant computes exactly, in this order (fma = one rounding):
 *
 *   q4_0, q5_0, q8_0   acc = fma(float(sum q*a - o * sum a), d*da, acc)            o = 8, 16, 0
 *   q4_1, q5_1         acc = fma(float(sum q*a), d*da, acc);         acc = fma(m, da*float(sum a), acc)
 *   q4_k, q5_k         acc = fma(float(sum q*a), (d*sc)*da, acc);    acc = fma(-(dmin*mn), da*float(sum a), acc)
 *   q6_k               acc = fma(float(sum_h sc_h * (sum q*a - 32 * sum a)), d*da, acc)    h: halves of 16 inputs
 *
 * Integer sums are exact in int32; d, m, dmin are widened from f16 exactly.
 *
 * Products with float32 rows. w is the format's float32 value (d*(q-o); d*q + m and (d*sc)*q - dmin*mn with separate
 * roundings; q6_k (d*sc)*(q-32)); input k adds to accumulator k mod 4 by fma, in order of k; the result is
 * (a0 + a1) + (a2 + a3). */
#ifndef METRALE_FORMATS_H
#define METRALE_FORMATS_H

#include <stdint.h>

enum { Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, F16, BF16, F32, NUM_FORMATS };
enum { PANEL = 16, BLOCK = 32, GROUPS = 8, SUPER = 8 };

#define INLINE static inline __attribute__((always_inline))

INLINE int format_is_super(int f) { return f == Q4_K || f == Q5_K || f == Q6_K; }
INLINE int format_is_dense(int f) { return f >= F16; }
INLINE int format_has_min(int f) { return f == Q4_1 || f == Q5_1 || f == Q4_K || f == Q5_K; }

INLINE int64_t header_bytes(int f) { return f == Q6_K ? 32 : f == Q4_K || f == Q5_K ? 64 : 0; }

/* Bytes of a record (block formats: 32 inputs; dense: one input). */
INLINE int64_t record_bytes(int f) {
    switch (f) {
    case Q4_0: case Q4_K: return 288;
    case Q4_1: return 320;
    case Q5_0: case Q5_K: return 352;
    case Q5_1: return 384;
    case Q8_0: return 544;
    case Q6_K: return 416;
    case F32: return 64;
    default: return 32;
    }
}

/* Offset of the bytes behind the quantized bits: scales. */
INLINE int64_t scale_offset(int f) {
    switch (f) {
    case Q4_0: case Q4_1: case Q4_K: return 256;
    case Q5_0: case Q5_1: case Q5_K: return 320;
    case Q6_K: return 384;
    default: return 512;
    }
}

/* Offset of block b inside a panel; at a super-block's first record, of the record (its header lies before it). */
INLINE int64_t record_at(int f, int64_t b) {
    return b * record_bytes(f) + (format_is_super(f) ? (b / SUPER + 1) * header_bytes(f) : 0);
}

INLINE int64_t header_at(int f, int64_t b) {
    return b / SUPER * (SUPER * record_bytes(f) + header_bytes(f));
}

INLINE int64_t panel_bytes(int f, int64_t k) {
    if (format_is_dense(f)) return k * record_bytes(f);
    int64_t blocks = k / BLOCK;
    return blocks * record_bytes(f) + (format_is_super(f) ? blocks / SUPER * header_bytes(f) : 0);
}

INLINE float bits_to_float(uint32_t bits) {
    float f;
    __builtin_memcpy(&f, &bits, 4);
    return f;
}

INLINE uint32_t float_to_bits(float f) {
    uint32_t bits;
    __builtin_memcpy(&bits, &f, 4);
    return bits;
}

/* Widen an f16, exactly; a signalling NaN becomes quiet, as the hardware conversions do. */
INLINE float half_to_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, mag = h & 0x7FFF;
    if (mag >= 0x7C00) return bits_to_float(sign | 0x7F800000 | (mag & 0x3FF) << 13 | (mag > 0x7C00 ? 0x400000 : 0));
    if (mag >= 0x400) return bits_to_float(sign | ((mag << 13) + 0x38000000));
    float small = (float)mag * 0x1p-24f;
    return bits_to_float(sign | float_to_bits(small));
}

#endif
