/* The vector types in plain C: 16 lanes = the 16 rows of a panel. What the other simd_*.h files must equal. */
#define ISA generic
#define NC_MAX 2      /* columns of the widest product kernel */
#define NCF_MAX 2     /* the same for float rows */
#define ACC_IN_MEMORY 1
#define Q8_BIAS 0     /* added to q8_0 bits to make them unsigned */
/* Groups whose products may be summed before they are widened to int32. */
#define CHUNK4 8
#define CHUNK5 8
#define CHUNK6 4
#define CHUNK8 8

#include <math.h>
#include <string.h>
#include "formats.h"

#define UNROLL(n) /* plain loops: small code matters more here */

typedef struct { float v[16]; } vf;
typedef struct { int32_t v[16]; } vi;
typedef struct { uint8_t v[64]; } vb;
typedef vi vd;
#define EACH for (int l = 0; l < 16; l++)
#define EACHB for (int l = 0; l < 64; l++)

INLINE vf vf_load(const float *p) { vf r; memcpy(&r, p, 64); return r; }
INLINE void vf_store(float *p, vf a) { memcpy(p, &a, 64); }
INLINE vf vf_set1(float x) { vf r; EACH r.v[l] = x; return r; }
INLINE vf vf_add(vf a, vf b) { EACH a.v[l] = a.v[l] + b.v[l]; return a; }
INLINE vf vf_sub(vf a, vf b) { EACH a.v[l] = a.v[l] - b.v[l]; return a; }
INLINE vf vf_mul(vf a, vf b) { EACH a.v[l] = a.v[l] * b.v[l]; return a; }
INLINE vf vf_div(vf a, vf b) { EACH a.v[l] = a.v[l] / b.v[l]; return a; }
INLINE vf vf_fma(vf a, vf b, vf c) { EACH a.v[l] = fmaf(a.v[l], b.v[l], c.v[l]); return a; }
INLINE vf vf_neg(vf a) { EACH a.v[l] = bits_to_float(float_to_bits(a.v[l]) ^ 0x80000000u); return a; }
/* a where x > limit, else b */
INLINE vf vf_if_gt(vf x, vf limit, vf a, vf b) { EACH a.v[l] = x.v[l] > limit.v[l] ? a.v[l] : b.v[l]; return a; }
/* x where x > y, else y, which so is the result of a NaN: as x86 does it */
INLINE vf vf_max(vf x, vf y) { return vf_if_gt(x, y, x, y); }
INLINE vf vf_from_int(vi a) { vf r; EACH r.v[l] = (float)a.v[l]; return r; }
INLINE vf vf_cast(vi a) { vf r; memcpy(&r, &a, 64); return r; }
INLINE vi vi_cast(vf a) { vi r; memcpy(&r, &a, 64); return r; }
INLINE vf vf_half(const void *p) {
    vf r;
    EACH { uint16_t h; memcpy(&h, (const char *)p + 2 * l, 2); r.v[l] = half_to_float(h); }
    return r;
}
INLINE vf vf_bfloat(const void *p) {
    vf r;
    EACH { uint16_t h; memcpy(&h, (const char *)p + 2 * l, 2); r.v[l] = bits_to_float((uint32_t)h << 16); }
    return r;
}
INLINE vi vi_bytes(const void *p) { vi r; EACH r.v[l] = ((const uint8_t *)p)[l]; return r; }
INLINE vi vi_sbytes(const void *p) { vi r; EACH r.v[l] = ((const int8_t *)p)[l]; return r; }
INLINE vi vi_load(const void *p) { vi r; memcpy(&r, p, 64); return r; }
INLINE void vi_store(void *p, vi a) { memcpy(p, &a, 64); }
INLINE vi vi_set1(int32_t x) { vi r; EACH r.v[l] = x; return r; }
INLINE vi vi_add(vi a, vi b) { EACH a.v[l] = (int32_t)((uint32_t)a.v[l] + (uint32_t)b.v[l]); return a; }
INLINE vi vi_sub(vi a, vi b) { EACH a.v[l] = (int32_t)((uint32_t)a.v[l] - (uint32_t)b.v[l]); return a; }
INLINE vi vi_shl(vi a, int n) { EACH a.v[l] = (int32_t)((uint32_t)a.v[l] << n); return a; }

/* byte j of each lane: 0..3 */
INLINE vi vb_byte(vb w, int j) { vi r; EACH r.v[l] = w.v[4 * l + j]; return r; }
INLINE vb vb_load(const void *p) { vb r; memcpy(&r, p, 64); return r; }
INLINE void vb_store(void *p, vb a) { memcpy(p, &a, 64); }
INLINE vb vb_low(vb a) { EACHB a.v[l] &= 15; return a; }
INLINE vb vb_high(vb a) { EACHB a.v[l] >>= 4; return a; }
INLINE vb vb_or(vb a, vb b) { EACHB a.v[l] |= b.v[l]; return a; }
INLINE vb vb_flip(vb a) { EACHB a.v[l] ^= 0x80; return a; }
/* bit g of each byte, as 16 */
INLINE vb vb_fifth(vb h, int g) { EACHB h.v[l] = (uint8_t)((h.v[l] >> g & 1) << 4); return h; }
/* bits 2g and 2g+1 of each byte, as 16 and 32 */
INLINE vb vb_sixth(vb h, int g) { EACHB h.v[l] = (uint8_t)((h.v[l] >> 2 * g & 3) << 4); return h; }

/* Chunk of products: sums of 4 inputs of each row, w unsigned (q8_0: signed) times 4 int8 in `a`. */
INLINE vd dot_next(int fmt, vd c, vb w, int32_t a) {
    int8_t b[4];
    memcpy(b, &a, 4);
    EACH for (int j = 0; j < 4; j++) {
        int q = fmt == Q8_0 ? (int8_t)w.v[4 * l + j] : w.v[4 * l + j];
        c.v[l] += q * b[j];
    }
    return c;
}
INLINE vd dot_first(int fmt, vb w, int32_t a) { return dot_next(fmt, vi_set1(0), w, a); }
INLINE vi dot_widen(vd c) { return c; }
INLINE vi dot_widen_add(vi sum, vd c) { return vi_add(sum, c); }

/* q6_k: scales of the two halves, in the shape the variant multiplies with. */
typedef struct { vi first, second, pair; } v6;
INLINE v6 v6_load(const void *sc) {
    v6 r = {vi_sbytes(sc), vi_sbytes((const char *)sc + 16), vi_set1(0)};
    return r;
}
INLINE vi dot_scaled(vd c, vi sc) { EACH c.v[l] *= sc.v[l]; return c; }
/* sc_first * low half of pair + sc_second * high half */
INLINE vi dot_scaled_add(vi sum, vd c, vi sc) { return vi_add(sum, dot_scaled(c, sc)); }
INLINE vi dot_pair(v6 s, int32_t pair) {
    int32_t a = (int16_t)(pair & 0xFFFF), b = pair >> 16;
    vi r;
    EACH r.v[l] = s.first.v[l] * a + s.second.v[l] * b;
    return r;
}
#undef EACH
#undef EACHB
