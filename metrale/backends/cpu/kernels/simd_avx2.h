/* 16 lanes as two 256-bit registers: AVX2 + FMA + F16C, and with __AVXVNNI__ the 256-bit dot products.
 *
 * Without VNNI a chunk is int16: vpmaddubsw adds two products; 8 groups of 4-bit weights stay below 8*2*15*127 = 30480,
 * 4 groups of 5-bit ones below 31496, 2 groups of 6-bit ones below 32004, and one of |int8| below 32512. */
#define NC_MAX 4
#define NCF_MAX 6
#define ACC_IN_MEMORY 2 /* from so many columns on, float sums live in L1 between blocks */
#ifdef __AVXVNNI__
#define ISA avxvnni
#define Q8_BIAS 128
#define CHUNK4 8
#define CHUNK5 8
#define CHUNK6 4
#define CHUNK8 8
#else
#define ISA avx2
#define Q8_BIAS 0
#define CHUNK4 8
#define CHUNK5 4
#define CHUNK6 2
#define CHUNK8 1
#endif

#include <immintrin.h>
#include <string.h>
#include "formats.h"

#define PRAGMA(x) _Pragma(#x)
#define UNROLL(n) PRAGMA(GCC unroll n)

typedef struct { __m256 a, b; } vf;
typedef struct { __m256i a, b; } vi;
typedef vi vb;
typedef vi vd;
#define VF(x, y) ((vf){(x), (y)})
#define VI(x, y) ((vi){(x), (y)})
#define LOADI(p) _mm256_loadu_si256((const __m256i *)(p))

INLINE vf vf_load(const float *p) { return VF(_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)); }
INLINE void vf_store(float *p, vf x) { _mm256_storeu_ps(p, x.a); _mm256_storeu_ps(p + 8, x.b); }
INLINE vf vf_set1(float x) { __m256 v = _mm256_set1_ps(x); return VF(v, v); }
INLINE vf vf_add(vf x, vf y) { return VF(_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)); }
INLINE vf vf_sub(vf x, vf y) { return VF(_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)); }
INLINE vf vf_mul(vf x, vf y) { return VF(_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)); }
INLINE vf vf_div(vf x, vf y) { return VF(_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)); }
INLINE vf vf_fma(vf x, vf y, vf z) { return VF(_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)); }
INLINE vf vf_neg(vf x) { __m256 s = _mm256_set1_ps(-0.0f); return VF(_mm256_xor_ps(x.a, s), _mm256_xor_ps(x.b, s)); }
INLINE vf vf_if_gt(vf x, vf limit, vf p, vf q) {
    return VF(_mm256_blendv_ps(q.a, p.a, _mm256_cmp_ps(x.a, limit.a, _CMP_GT_OQ)),
              _mm256_blendv_ps(q.b, p.b, _mm256_cmp_ps(x.b, limit.b, _CMP_GT_OQ)));
}
INLINE vf vf_max(vf x, vf y) { return VF(_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)); }
INLINE vf vf_from_int(vi x) { return VF(_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)); }
INLINE vf vf_cast(vi x) { return VF(_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)); }
INLINE vi vi_cast(vf x) { return VI(_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)); }
INLINE vf vf_half(const void *p) {
    const __m128i *h = p;
    return VF(_mm256_cvtph_ps(_mm_loadu_si128(h)), _mm256_cvtph_ps(_mm_loadu_si128(h + 1)));
}
INLINE vf vf_bfloat(const void *p) {
    const __m128i *h = p;
    return VF(_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(h)), 16)),
              _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(h + 1)), 16)));
}
INLINE vi vi_bytes(const void *p) {
    __m128i v = _mm_loadu_si128(p);
    return VI(_mm256_cvtepu8_epi32(v), _mm256_cvtepu8_epi32(_mm_srli_si128(v, 8)));
}
INLINE vi vi_sbytes(const void *p) {
    __m128i v = _mm_loadu_si128(p);
    return VI(_mm256_cvtepi8_epi32(v), _mm256_cvtepi8_epi32(_mm_srli_si128(v, 8)));
}
INLINE vi vi_load(const void *p) { return VI(LOADI(p), LOADI((const char *)p + 32)); }
INLINE void vi_store(void *p, vi x) {
    _mm256_storeu_si256(p, x.a);
    _mm256_storeu_si256((__m256i *)((char *)p + 32), x.b);
}
INLINE vi vi_set1(int32_t x) { __m256i v = _mm256_set1_epi32(x); return VI(v, v); }
INLINE vi vi_add(vi x, vi y) { return VI(_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)); }
INLINE vi vi_sub(vi x, vi y) { return VI(_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)); }
INLINE vi vi_shl(vi x, int n) { return VI(_mm256_slli_epi32(x.a, n), _mm256_slli_epi32(x.b, n)); }
INLINE vi vi_shr(vi x, int n) { return VI(_mm256_srli_epi32(x.a, n), _mm256_srli_epi32(x.b, n)); }
INLINE vi vi_and(vi x, vi y) { return VI(_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)); }
INLINE vi vi_or(vi x, vi y) { return VI(_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)); }

INLINE vi vb_byte(vb w, int j) { return vi_and(vi_shr(w, 8 * j), vi_set1(255)); }
INLINE vb vb_load(const void *p) { return vi_load(p); }
INLINE void vb_store(void *p, vb x) { vi_store(p, x); }
INLINE vb vb_low(vb x) { return vi_and(x, vi_set1(0x0F0F0F0F)); }
INLINE vb vb_high(vb x) { return vi_and(vi_shr(x, 4), vi_set1(0x0F0F0F0F)); }
INLINE vb vb_or(vb x, vb y) { return vi_or(x, y); }
INLINE vb vb_flip(vb x) {
    __m256i s = _mm256_set1_epi8((char)0x80);
    return VI(_mm256_xor_si256(x.a, s), _mm256_xor_si256(x.b, s));
}
INLINE vb vb_fifth(vb h, int g) { return vi_and(g < 4 ? vi_shl(h, 4 - g) : vi_shr(h, g - 4), vi_set1(0x10101010)); }
INLINE vb vb_sixth(vb h, int g) {
    return vi_and(g < 2 ? vi_shl(h, 4 - 2 * g) : vi_shr(h, 2 * g - 4), vi_set1(0x30303030));
}

typedef struct { vi first, second, pair; } v6;

/* Keeps the compiler from reordering integer sums: it would make all products first and spill every one. */
#define KEEP(x) __asm__("" : "+x"((x).a), "+x"((x).b))

#ifdef __AVXVNNI__
INLINE vd dot_next(int fmt, vd c, vb w, int32_t a) {
    (void)fmt;
    __m256i v = _mm256_set1_epi32(a);
    return VI(_mm256_dpbusd_avx_epi32(c.a, w.a, v), _mm256_dpbusd_avx_epi32(c.b, w.b, v));
}
INLINE vd dot_first(int fmt, vb w, int32_t a) { return dot_next(fmt, vi_set1(0), w, a); }
INLINE vi dot_widen(vd c) { return c; }
INLINE vi dot_widen_add(vi sum, vd c) { return vi_add(sum, c); }
INLINE vi dot_scaled(vd c, vi sc) { return VI(_mm256_mullo_epi32(c.a, sc.a), _mm256_mullo_epi32(c.b, sc.b)); }
INLINE vi dot_scaled_add(vi sum, vd c, vi sc) { return vi_add(sum, dot_scaled(c, sc)); }
INLINE v6 v6_load(const void *sc) {
    vi x = vi_sbytes(sc), y = vi_sbytes((const char *)sc + 16);
    v6 r = {x, y, vi_or(vi_and(x, vi_set1(0xFFFF)), vi_shl(y, 16))};
    return r;
}
#else
INLINE vd dot_first(int fmt, vb w, int32_t a) {
    __m256i v = _mm256_set1_epi32(a);
    if (fmt == Q8_0)
        return VI(_mm256_maddubs_epi16(_mm256_abs_epi8(w.a), _mm256_sign_epi8(v, w.a)),
                  _mm256_maddubs_epi16(_mm256_abs_epi8(w.b), _mm256_sign_epi8(v, w.b)));
    return VI(_mm256_maddubs_epi16(w.a, v), _mm256_maddubs_epi16(w.b, v));
}
INLINE vd dot_next(int fmt, vd c, vb w, int32_t a) {
    vd d = dot_first(fmt, w, a);
    c = VI(_mm256_add_epi16(c.a, d.a), _mm256_add_epi16(c.b, d.b));
    KEEP(c);
    return c;
}
INLINE vi dot_scaled(vd c, vi sc) { return VI(_mm256_madd_epi16(c.a, sc.a), _mm256_madd_epi16(c.b, sc.b)); }
INLINE vi dot_widen(vd c) { return dot_scaled(c, vi_set1(0x00010001)); }
INLINE vi dot_widen_add(vi sum, vd c) {
    sum = vi_add(sum, dot_widen(c));
    KEEP(sum);
    return sum;
}
INLINE vi dot_scaled_add(vi sum, vd c, vi sc) {
    sum = vi_add(sum, dot_scaled(c, sc));
    KEEP(sum);
    return sum;
}
INLINE v6 v6_load(const void *sc) {
    vi x = vi_sbytes(sc), y = vi_sbytes((const char *)sc + 16), low = vi_set1(0xFFFF);
    v6 r = {vi_or(vi_and(x, low), vi_shl(x, 16)), vi_or(vi_and(y, low), vi_shl(y, 16)), vi_or(vi_and(x, low), vi_shl(y, 16))};
    return r;
}
#endif
INLINE vi dot_pair(v6 s, int32_t pair) {
    __m256i v = _mm256_set1_epi32(pair);
    return VI(_mm256_madd_epi16(s.pair.a, v), _mm256_madd_epi16(s.pair.b, v));
}
