// Weights as a checkpoint's file has them: dense elements, or GGUF blocks. Layouts: metrale/quant/blocks.py.
//
// Every block format is read in groups of 32 elements, element i of a group being
//     scale[i / 16] * q(i) + minimum
// with a small integer q. The products are exact in float32, so only the last addition rounds, as in the reference.

struct Group {
    float scale[2];
    float minimum;
};

__device__ inline bool is_dense(int format) { return format == FORMAT_F32 || format == FORMAT_F16 || format == FORMAT_BF16; }

// Rows of block formats are 2-byte aligned: every block has an even size.
__device__ inline float half_at(const u8 *at) { return f16_to_float(*reinterpret_cast<const u16 *>(at)); }

// Element i of 16 bytes: the low halves are elements 0..15, the high halves 16..31.
__device__ inline int nibble(const u8 *bytes, int i) { return i < 16 ? bytes[i] & 15 : bytes[i - 16] >> 4; }

__device__ inline int bit(const u8 *bytes, int i) { return bytes[i / 8] >> (i % 8) & 1; }

// Where group g of a row begins: its block of 32, or the block of 256 that holds it.
__device__ inline const u8 *block_of(int format, const u8 *row, int g) {
    switch (format) {
        case FORMAT_Q4_0: return row + 18ll * g;
        case FORMAT_Q4_1: return row + 20ll * g;
        case FORMAT_Q5_0: return row + 22ll * g;
        case FORMAT_Q5_1: return row + 24ll * g;
        case FORMAT_Q8_0: return row + 34ll * g;
        case FORMAT_Q4_K: return row + 144ll * (g / 8);
        case FORMAT_Q5_K: return row + 176ll * (g / 8);
        default: return row + 210ll * (g / 8);  // FORMAT_Q6_K
    }
}

// Scale and minimum of sub-block s of q4_k and q5_k.
__device__ inline Group k_group(const u8 *block, int s) {
    const u8 *packed = block + 4;
    int scale, minimum;
    if (s < 4) {
        scale = packed[s] & 63;
        minimum = packed[s + 4] & 63;
    } else {
        scale = (packed[s + 4] & 15) | (packed[s - 4] >> 6 << 4);
        minimum = (packed[s + 4] >> 4) | (packed[s] >> 6 << 4);
    }
    const float d = half_at(block) * scale;
    return {{d, d}, -(half_at(block + 2) * minimum)};
}

__device__ inline Group group_at(int format, const u8 *row, int g) {
    const u8 *block = block_of(format, row, g);
    switch (format) {
        case FORMAT_Q4_1:
        case FORMAT_Q5_1: return {{half_at(block), half_at(block)}, half_at(block + 2)};
        case FORMAT_Q4_K:
        case FORMAT_Q5_K: return k_group(block, g % 8);
        case FORMAT_Q6_K: {
            const i8 *scales = reinterpret_cast<const i8 *>(block + 192) + 2 * (g % 8);
            const float d = half_at(block + 208);
            return {{d * scales[0], d * scales[1]}, 0.0f};
        }
        default: return {{half_at(block), half_at(block)}, 0.0f};  // q4_0, q5_0, q8_0
    }
}

// The integer q of element i of group g.
__device__ inline int quant_at(int format, const u8 *row, int g, int i) {
    const u8 *block = block_of(format, row, g);
    const int s = g % 8;
    switch (format) {
        case FORMAT_Q4_0: return nibble(block + 2, i) - 8;
        case FORMAT_Q4_1: return nibble(block + 4, i);
        case FORMAT_Q5_0: return (nibble(block + 6, i) | bit(block + 2, i) << 4) - 16;
        case FORMAT_Q5_1: return nibble(block + 8, i) | bit(block + 4, i) << 4;
        case FORMAT_Q8_0: return reinterpret_cast<const i8 *>(block + 2)[i];
        case FORMAT_Q4_K: return block[16 + 32 * (s / 2) + i] >> 4 * (s % 2) & 15;
        case FORMAT_Q5_K: return (block[48 + 32 * (s / 2) + i] >> 4 * (s % 2) & 15) | (block[16 + i] >> s & 1) << 4;
        default: {  // FORMAT_Q6_K: halves of 128, quarters of 32
            const int half = s / 4, quarter = s % 4;
            const int low = block[64 * half + 32 * (quarter % 2) + i] >> 4 * (quarter / 2) & 15;
            const int high = block[128 + 32 * half + i] >> 2 * quarter & 3;
            return (low | high << 4) - 32;
        }
    }
}

// Element k of a row in any format.
__device__ inline float weight_at(int format, const u8 *row, int k) {
    switch (format) {
        case FORMAT_F32: return reinterpret_cast<const float *>(row)[k];
        case FORMAT_F16: return f16_to_float(reinterpret_cast<const u16 *>(row)[k]);
        case FORMAT_BF16: return bf16_to_float(reinterpret_cast<const u16 *>(row)[k]);
        default: {
            const Group group = group_at(format, row, k / 32);
            return group.scale[k % 32 / 16] * quant_at(format, row, k / 32, k % 32) + group.minimum;
        }
    }
}
