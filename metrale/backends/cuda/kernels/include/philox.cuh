// Philox4x32-10: a counter-based generator. Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".

struct Words {
    u32 word[4];
};

__device__ inline Words philox(u32 c0, u32 c1, u32 c2, u32 c3, u32 k0, u32 k1) {
#pragma unroll 1
    for (int round = 0; round < 10; ++round) {
        const u64 a = static_cast<u64>(0xD2511F53u) * c0;
        const u64 b = static_cast<u64>(0xCD9E8D57u) * c2;
        c0 = static_cast<u32>(b >> 32) ^ c1 ^ k0;
        c1 = static_cast<u32>(b);
        c2 = static_cast<u32>(a >> 32) ^ c3 ^ k1;
        c3 = static_cast<u32>(a);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return {{c0, c1, c2, c3}};
}

// Standard Gumbel noise from one word. In float32 the largest words would round to u = 1 and infinite noise.
__device__ inline double gumbel(u32 word) {
    const double u = (static_cast<double>(word) + 0.5) * 0x1p-32;
    return -log(-log(u));
}
