// Element types and their conversions, without toolkit headers. Arithmetic is float32; storage is T (from the prelude).

typedef signed char i8;
typedef unsigned char u8;
typedef short i16;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

struct f16 {
    u16 bits;
};
struct bf16 {
    u16 bits;
};

[[maybe_unused]] constexpr u32 FULL_WARP = 0xFFFFFFFFu;

__device__ inline float infinity() { return __int_as_float(0x7F800000); }
__device__ inline float not_a_number() { return __int_as_float(0x7FC00000); }
__device__ inline bool is_nan(float x) { return x != x; }

__device__ inline float f16_to_float(u16 bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}

__device__ inline u16 float_to_f16(float x) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

__device__ inline float bf16_to_float(u16 bits) { return __uint_as_float(static_cast<u32>(bits) << 16); }

// Nearest even; every NaN becomes the quiet one, as in metrale.dtypes.
__device__ inline u16 float_to_bf16(float x) {
    if (is_nan(x)) return 0x7FC0;
    const u32 bits = __float_as_uint(x);
    return static_cast<u16>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(f16 x) { return f16_to_float(x.bits); }
__device__ inline float to_float(bf16 x) { return bf16_to_float(x.bits); }

__device__ inline void put(float *to, float x) { *to = x; }
__device__ inline void put(f16 *to, float x) { to->bits = float_to_f16(x); }
__device__ inline void put(bf16 *to, float x) { to->bits = float_to_bf16(x); }

// x as an X can hold it.
template <class X> __device__ inline float rounded(float x) {
    X stored;
    put(&stored, x);
    return to_float(stored);
}

// This thread's number in the launch; kernels whose work is a flat range start from it.
__device__ inline i64 thread_number() { return static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x; }
