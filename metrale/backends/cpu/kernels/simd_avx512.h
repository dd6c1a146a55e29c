/* 16 lanes as one 512-bit register: AVX-512 F, BW, VL, DQ and VNNI. vpdpbusd adds four products to an int32 lane. */
#define ISA avx512vnni
#define NC_MAX 8
#define NCF_MAX 8
#define ACC_IN_MEMORY 99 /* 32 registers hold the float sums */
#define Q8_BIAS 128
#define CHUNK4 8
#define CHUNK5 8
#define CHUNK6 4
#define CHUNK8 8

#include <immintrin.h>
#include <string.h>
#include "formats.h"

#ifndef UNROLL /* a test that emulates the registers in memory leaves the loops alone */
#define PRAGMA(x) _Pragma(#x)
#define UNROLL(n) PRAGMA(GCC unroll n)
#endif

typedef __m512 vf;
typedef __m512i vi;
typedef __m512i vb;
typedef __m512i vd;

INLINE vf vf_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void vf_store(float *p, vf x) { _mm512_storeu_ps(p, x); }
INLINE vf vf_set1(float x) { return _mm512_set1_ps(x); }
INLINE vf vf_add(vf x, vf y) { return _mm512_add_ps(x, y); }
INLINE vf vf_sub(vf x, vf y) { return _mm512_sub_ps(x, y); }
INLINE vf vf_mul(vf x, vf y) { return _mm512_mul_ps(x, y); }
INLINE vf vf_div(vf x, vf y) { return _mm512_div_ps(x, y); }
INLINE vf vf_fma(vf x, vf y, vf z) { return _mm512_fmadd_ps(x, y, z); }
INLINE vf vf_neg(vf x) { return _mm512_xor_ps(x, _mm512_set1_ps(-0.0f)); }
INLINE vf vf_if_gt(vf x, vf limit, vf p, vf q) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, limit, _CMP_GT_OQ), q, p);
}
INLINE vf vf_max(vf x, vf y) { return _mm512_max_ps(x, y); }
INLINE vf vf_from_int(vi x) { return _mm512_cvtepi32_ps(x); }
INLINE vf vf_cast(vi x) { return _mm512_castsi512_ps(x); }
INLINE vi vi_cast(vf x) { return _mm512_castps_si512(x); }
INLINE vf vf_half(const void *p) { return _mm512_cvtph_ps(_mm256_loadu_si256(p)); }
INLINE vf vf_bfloat(const void *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(p)), 16));
}
INLINE vi vi_bytes(const void *p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128(p)); }
INLINE vi vi_sbytes(const void *p) { return _mm512_cvtepi8_epi32(_mm_loadu_si128(p)); }
INLINE vi vi_load(const void *p) { return _mm512_loadu_si512(p); }
INLINE void vi_store(void *p, vi x) { _mm512_storeu_si512(p, x); }
INLINE vi vi_set1(int32_t x) { return _mm512_set1_epi32(x); }
INLINE vi vi_add(vi x, vi y) { return _mm512_add_epi32(x, y); }
INLINE vi vi_sub(vi x, vi y) { return _mm512_sub_epi32(x, y); }
INLINE vi vi_shl(vi x, int n) { return _mm512_slli_epi32(x, (unsigned)n); }
INLINE vi vi_shr(vi x, int n) { return _mm512_srli_epi32(x, (unsigned)n); }
INLINE vi vi_and(vi x, vi y) { return _mm512_and_si512(x, y); }
INLINE vi vi_or(vi x, vi y) { return _mm512_or_si512(x, y); }

INLINE vi vb_byte(vb w, int j) { return vi_and(vi_shr(w, 8 * j), vi_set1(255)); }
INLINE vb vb_load(const void *p) { return vi_load(p); }
INLINE void vb_store(void *p, vb x) { vi_store(p, x); }
INLINE vb vb_low(vb x) { return vi_and(x, vi_set1(0x0F0F0F0F)); }
INLINE vb vb_high(vb x) { return vi_and(vi_shr(x, 4), vi_set1(0x0F0F0F0F)); }
INLINE vb vb_or(vb x, vb y) { return vi_or(x, y); }
INLINE vb vb_flip(vb x) { return _mm512_xor_si512(x, _mm512_set1_epi8((char)0x80)); }
INLINE vb vb_fifth(vb h, int g) { return vi_and(g < 4 ? vi_shl(h, 4 - g) : vi_shr(h, g - 4), vi_set1(0x10101010)); }
INLINE vb vb_sixth(vb h, int g) {
    return vi_and(g < 2 ? vi_shl(h, 4 - 2 * g) : vi_shr(h, 2 * g - 4), vi_set1(0x30303030));
}

INLINE vd dot_next(int fmt, vd c, vb w, int32_t a) {
    (void)fmt;
    return _mm512_dpbusd_epi32(c, w, _mm512_set1_epi32(a));
}
INLINE vd dot_first(int fmt, vb w, int32_t a) { return dot_next(fmt, _mm512_setzero_si512(), w, a); }
INLINE vi dot_widen(vd c) { return c; }
INLINE vi dot_widen_add(vi sum, vd c) { return vi_add(sum, c); }

typedef struct { vi first, second, pair; } v6;
INLINE v6 v6_load(const void *sc) {
    vi x = vi_sbytes(sc), y = vi_sbytes((const char *)sc + 16);
    v6 r = {x, y, vi_or(vi_and(x, vi_set1(0xFFFF)), vi_shl(y, 16))};
    return r;
}
INLINE vi dot_scaled(vd c, vi sc) { return _mm512_mullo_epi32(c, sc); }
INLINE vi dot_scaled_add(vi sum, vd c, vi sc) { return vi_add(sum, dot_scaled(c, sc)); }
INLINE vi dot_pair(v6 s, int32_t pair) { return _mm512_madd_epi16(s.pair, _mm512_set1_epi32(pair)); }
