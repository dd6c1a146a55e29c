/* The AVX-512 intrinsics of kernels/simd_avx512.h in plain C, from their definitions in Intel's manual, so that a machine
 * without AVX-512 checks that variant's logic. Found before the compiler's own header by the include path. */
#ifndef EMULATED_IMMINTRIN_H
#define EMULATED_IMMINTRIN_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "formats.h"

typedef struct { float f[16]; } __m512;
typedef struct { int32_t i[16]; } __m512i;
typedef struct { uint8_t b[32]; } __m256i;
typedef struct { uint8_t b[16]; } __m128i;
typedef uint16_t __mmask16;
#define _CMP_GT_OQ 30
#define EMU static inline __attribute__((unused))
#define LANES for (int l = 0; l < 16; l++)
#define FLOATS(name, e) EMU __m512 name(__m512 x, __m512 y) { __m512 r; LANES r.f[l] = e; return r; }
#define INTS(name, e) EMU __m512i name(__m512i x, __m512i y) { __m512i r; LANES r.i[l] = (int32_t)(e); return r; }

EMU __m512 _mm512_loadu_ps(const void *p) { __m512 r; memcpy(&r, p, 64); return r; }
EMU void _mm512_storeu_ps(void *p, __m512 x) { memcpy(p, &x, 64); }
EMU __m512i _mm512_loadu_si512(const void *p) { __m512i r; memcpy(&r, p, 64); return r; }
EMU void _mm512_storeu_si512(void *p, __m512i x) { memcpy(p, &x, 64); }
EMU __m256i _mm256_loadu_si256(const void *p) { __m256i r; memcpy(&r, p, 32); return r; }
EMU __m128i _mm_loadu_si128(const void *p) { __m128i r; memcpy(&r, p, 16); return r; }
EMU __m512 _mm512_set1_ps(float x) { __m512 r; LANES r.f[l] = x; return r; }
EMU __m512i _mm512_set1_epi32(int32_t x) { __m512i r; LANES r.i[l] = x; return r; }
EMU __m512i _mm512_set1_epi8(char x) { __m512i r; memset(&r, x, 64); return r; }
EMU __m512i _mm512_setzero_si512(void) { return _mm512_set1_epi32(0); }
EMU __m512 _mm512_castsi512_ps(__m512i x) { __m512 r; memcpy(&r, &x, 64); return r; }
EMU __m512i _mm512_castps_si512(__m512 x) { __m512i r; memcpy(&r, &x, 64); return r; }
FLOATS(_mm512_add_ps, x.f[l] + y.f[l])
FLOATS(_mm512_sub_ps, x.f[l] - y.f[l])
FLOATS(_mm512_mul_ps, x.f[l] * y.f[l])
FLOATS(_mm512_div_ps, x.f[l] / y.f[l])
FLOATS(_mm512_max_ps, x.f[l] > y.f[l] ? x.f[l] : y.f[l])
FLOATS(_mm512_xor_ps, bits_to_float(float_to_bits(x.f[l]) ^ float_to_bits(y.f[l])))
EMU __m512 _mm512_fmadd_ps(__m512 x, __m512 y, __m512 z) { __m512 r; LANES r.f[l] = fmaf(x.f[l], y.f[l], z.f[l]); return r; }
EMU __mmask16 _mm512_cmp_ps_mask(__m512 x, __m512 y, int op) {
    unsigned m = 0;
    (void)op;
    LANES m |= (unsigned)(x.f[l] > y.f[l]) << l;
    return (__mmask16)m;
}
EMU __m512 _mm512_mask_blend_ps(__mmask16 m, __m512 x, __m512 y) { __m512 r; LANES r.f[l] = m >> l & 1 ? y.f[l] : x.f[l]; return r; }
EMU __m512 _mm512_cvtepi32_ps(__m512i x) { __m512 r; LANES r.f[l] = (float)x.i[l]; return r; }
EMU __m512 _mm512_cvtph_ps(__m256i h) {
    __m512 r;
    LANES { uint16_t v; memcpy(&v, h.b + 2 * l, 2); r.f[l] = half_to_float(v); }
    return r;
}
EMU __m512i _mm512_cvtepu16_epi32(__m256i h) {
    __m512i r;
    LANES { uint16_t v; memcpy(&v, h.b + 2 * l, 2); r.i[l] = v; }
    return r;
}
EMU __m512i _mm512_cvtepu8_epi32(__m128i h) { __m512i r; LANES r.i[l] = h.b[l]; return r; }
EMU __m512i _mm512_cvtepi8_epi32(__m128i h) { __m512i r; LANES r.i[l] = (int8_t)h.b[l]; return r; }
INTS(_mm512_add_epi32, (uint32_t)x.i[l] + (uint32_t)y.i[l])
INTS(_mm512_sub_epi32, (uint32_t)x.i[l] - (uint32_t)y.i[l])
INTS(_mm512_and_si512, x.i[l] & y.i[l])
INTS(_mm512_or_si512, x.i[l] | y.i[l])
INTS(_mm512_xor_si512, x.i[l] ^ y.i[l])
INTS(_mm512_mullo_epi32, (uint32_t)x.i[l] * (uint32_t)y.i[l])
INTS(_mm512_madd_epi16, (int16_t)(x.i[l] & 0xFFFF) * (int16_t)(y.i[l] & 0xFFFF) + (x.i[l] >> 16) * (y.i[l] >> 16))
EMU __m512i _mm512_slli_epi32(__m512i x, unsigned n) { LANES x.i[l] = (int32_t)((uint32_t)x.i[l] << n); return x; }
EMU __m512i _mm512_srli_epi32(__m512i x, unsigned n) { LANES x.i[l] = (int32_t)((uint32_t)x.i[l] >> n); return x; }
EMU __m512i _mm512_dpbusd_epi32(__m512i c, __m512i w, __m512i a) {
    uint8_t u[64];
    int8_t s[64];
    memcpy(u, &w, 64);
    memcpy(s, &a, 64);
    for (int l = 0; l < 64; l++) c.i[l / 4] += u[l] * s[l];
    return c;
}

#endif
