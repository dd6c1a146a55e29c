/* The 256-bit dot product of AVX-VNNI in AVX2, for machines without it: force-included before kernels/simd_avx2.h. */
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define __AVXVNNI__ 1
#define _mm256_dpbusd_avx_epi32 emulated_dpbusd

static inline __attribute__((unused)) __m256i emulated_dpbusd(__m256i c, __m256i w, __m256i a) {
    int32_t sum[8];
    uint8_t u[32];
    int8_t s[32];
    memcpy(sum, &c, 32);
    memcpy(u, &w, 32);
    memcpy(s, &a, 32);
    for (int l = 0; l < 32; l++) sum[l / 4] += u[l] * s[l];
    memcpy(&c, sum, 32);
    return c;
}
