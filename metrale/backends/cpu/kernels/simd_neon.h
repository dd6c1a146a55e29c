/* 16 lanes as four 128-bit registers: Armv8.2 with the dot-product extension. sdot takes the unsigned bits of every
 * format but q8_0 as the same signed numbers (they are below 64). */
#define ISA neon
#define NC_MAX 4
#define NCF_MAX 4
#define ACC_IN_MEMORY 4
#define Q8_BIAS 0
#define CHUNK4 8
#define CHUNK5 8
#define CHUNK6 4
#define CHUNK8 8

#include <arm_neon.h>
#include <string.h>
#include "formats.h"

#define PRAGMA(x) _Pragma(#x)
#define UNROLL(n) PRAGMA(GCC unroll n)

typedef struct { float32x4_t v[4]; } vf;
typedef struct { int32x4_t v[4]; } vi;
typedef struct { uint8x16_t v[4]; } vb;
typedef vi vd;
#define FOUR(e) {{e(0), e(1), e(2), e(3)}}

#define E(i) vld1q_f32(p + 4 * i)
INLINE vf vf_load(const float *p) { vf r = FOUR(E); return r; }
#undef E
INLINE void vf_store(float *p, vf x) {
    vst1q_f32(p, x.v[0]); vst1q_f32(p + 4, x.v[1]); vst1q_f32(p + 8, x.v[2]); vst1q_f32(p + 12, x.v[3]);
}
INLINE vf vf_set1(float x) { float32x4_t v = vdupq_n_f32(x); vf r = {{v, v, v, v}}; return r; }
#define E(i) vaddq_f32(x.v[i], y.v[i])
INLINE vf vf_add(vf x, vf y) { vf r = FOUR(E); return r; }
#undef E
#define E(i) vsubq_f32(x.v[i], y.v[i])
INLINE vf vf_sub(vf x, vf y) { vf r = FOUR(E); return r; }
#undef E
#define E(i) vmulq_f32(x.v[i], y.v[i])
INLINE vf vf_mul(vf x, vf y) { vf r = FOUR(E); return r; }
#undef E
#define E(i) vdivq_f32(x.v[i], y.v[i])
INLINE vf vf_div(vf x, vf y) { vf r = FOUR(E); return r; }
#undef E
#define E(i) vfmaq_f32(z.v[i], x.v[i], y.v[i])
INLINE vf vf_fma(vf x, vf y, vf z) { vf r = FOUR(E); return r; }
#undef E
#define E(i) vnegq_f32(x.v[i])
INLINE vf vf_neg(vf x) { vf r = FOUR(E); return r; }
#undef E
#define E(i) vbslq_f32(vcgtq_f32(x.v[i], limit.v[i]), p.v[i], q.v[i])
INLINE vf vf_if_gt(vf x, vf limit, vf p, vf q) { vf r = FOUR(E); return r; }
#undef E
INLINE vf vf_max(vf x, vf y) { return vf_if_gt(x, y, x, y); }
#define E(i) vcvtq_f32_s32(x.v[i])
INLINE vf vf_from_int(vi x) { vf r = FOUR(E); return r; }
#undef E
#define E(i) vreinterpretq_f32_s32(x.v[i])
INLINE vf vf_cast(vi x) { vf r = FOUR(E); return r; }
#undef E
#define E(i) vreinterpretq_s32_f32(x.v[i])
INLINE vi vi_cast(vf x) { vi r = FOUR(E); return r; }
#undef E
#define E(i) vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t *)p + 4 * i)))
INLINE vf vf_half(const void *p) { vf r = FOUR(E); return r; }
#undef E
#define E(i) vreinterpretq_f32_u32(vshll_n_u16(vld1_u16((const uint16_t *)p + 4 * i), 16))
INLINE vf vf_bfloat(const void *p) { vf r = FOUR(E); return r; }
#undef E
INLINE vi vi_bytes(const void *p) {
    uint8x16_t b = vld1q_u8(p);
    uint16x8_t lo = vmovl_u8(vget_low_u8(b)), hi = vmovl_u8(vget_high_u8(b));
    vi r = {{vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(lo))), vreinterpretq_s32_u32(vmovl_u16(vget_high_u16(lo))),
             vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(hi))), vreinterpretq_s32_u32(vmovl_u16(vget_high_u16(hi)))}};
    return r;
}
INLINE vi vi_sbytes(const void *p) {
    int8x16_t b = vld1q_s8(p);
    int16x8_t lo = vmovl_s8(vget_low_s8(b)), hi = vmovl_s8(vget_high_s8(b));
    vi r = {{vmovl_s16(vget_low_s16(lo)), vmovl_s16(vget_high_s16(lo)), vmovl_s16(vget_low_s16(hi)), vmovl_s16(vget_high_s16(hi))}};
    return r;
}
#define E(i) vld1q_s32((const int32_t *)p + 4 * i)
INLINE vi vi_load(const void *p) { vi r = FOUR(E); return r; }
#undef E
INLINE void vi_store(void *p, vi x) {
    int32_t *q = p;
    vst1q_s32(q, x.v[0]); vst1q_s32(q + 4, x.v[1]); vst1q_s32(q + 8, x.v[2]); vst1q_s32(q + 12, x.v[3]);
}
INLINE vi vi_set1(int32_t x) { int32x4_t v = vdupq_n_s32(x); vi r = {{v, v, v, v}}; return r; }
#define E(i) vaddq_s32(x.v[i], y.v[i])
INLINE vi vi_add(vi x, vi y) { vi r = FOUR(E); return r; }
#undef E
#define E(i) vsubq_s32(x.v[i], y.v[i])
INLINE vi vi_sub(vi x, vi y) { vi r = FOUR(E); return r; }
#undef E
#define E(i) vshlq_s32(x.v[i], vdupq_n_s32(n))
INLINE vi vi_shl(vi x, int n) { vi r = FOUR(E); return r; }
#undef E

#define E(i) \
    vreinterpretq_s32_u32(vandq_u32(vshlq_u32(vreinterpretq_u32_u8(w.v[i]), vdupq_n_s32(-8 * j)), vdupq_n_u32(255)))
INLINE vi vb_byte(vb w, int j) { vi r = FOUR(E); return r; }
#undef E
#define E(i) vld1q_u8((const uint8_t *)p + 16 * i)
INLINE vb vb_load(const void *p) { vb r = FOUR(E); return r; }
#undef E
INLINE void vb_store(void *p, vb x) {
    uint8_t *q = p;
    vst1q_u8(q, x.v[0]); vst1q_u8(q + 16, x.v[1]); vst1q_u8(q + 32, x.v[2]); vst1q_u8(q + 48, x.v[3]);
}
#define E(i) vandq_u8(x.v[i], vdupq_n_u8(15))
INLINE vb vb_low(vb x) { vb r = FOUR(E); return r; }
#undef E
#define E(i) vshrq_n_u8(x.v[i], 4)
INLINE vb vb_high(vb x) { vb r = FOUR(E); return r; }
#undef E
#define E(i) vorrq_u8(x.v[i], y.v[i])
INLINE vb vb_or(vb x, vb y) { vb r = FOUR(E); return r; }
#undef E
#define E(i) veorq_u8(x.v[i], vdupq_n_u8(0x80))
INLINE vb vb_flip(vb x) { vb r = FOUR(E); return r; }
#undef E
#define E(i) vandq_u8(vshlq_u8(h.v[i], vdupq_n_s8((int8_t)(4 - g))), vdupq_n_u8(0x10))
INLINE vb vb_fifth(vb h, int g) { vb r = FOUR(E); return r; }
#undef E
#define E(i) vandq_u8(vshlq_u8(h.v[i], vdupq_n_s8((int8_t)(4 - 2 * g))), vdupq_n_u8(0x30))
INLINE vb vb_sixth(vb h, int g) { vb r = FOUR(E); return r; }
#undef E

INLINE vd dot_next(int fmt, vd c, vb w, int32_t a) {
    (void)fmt;
    int8x16_t v = vreinterpretq_s8_s32(vdupq_n_s32(a));
#define E(i) vdotq_s32(c.v[i], vreinterpretq_s8_u8(w.v[i]), v)
    vd r = FOUR(E);
#undef E
    return r;
}
INLINE vd dot_first(int fmt, vb w, int32_t a) { return dot_next(fmt, vi_set1(0), w, a); }
INLINE vi dot_widen(vd c) { return c; }
INLINE vi dot_widen_add(vi sum, vd c) { return vi_add(sum, c); }

typedef struct { vi first, second, pair; } v6;
INLINE v6 v6_load(const void *sc) {
    v6 r = {vi_sbytes(sc), vi_sbytes((const char *)sc + 16), vi_set1(0)};
    return r;
}
#define E(i) vmulq_s32(c.v[i], sc.v[i])
INLINE vi dot_scaled(vd c, vi sc) { vi r = FOUR(E); return r; }
#undef E
INLINE vi dot_scaled_add(vi sum, vd c, vi sc) { return vi_add(sum, dot_scaled(c, sc)); }
INLINE vi dot_pair(v6 s, int32_t pair) {
    int32_t a = (int16_t)(pair & 0xFFFF), b = pair >> 16;
#define E(i) vmlaq_n_s32(vmulq_n_s32(s.first.v[i], a), s.second.v[i], b)
    vi r = FOUR(E);
#undef E
    return r;
}
