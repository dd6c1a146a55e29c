/* Host-side packing: rows of a file to panels (layout in formats.h), and one row back, for tests and repacking. */
#include <string.h>

#include "abi.h"
#include "formats.h"

/* Bytes of a block of the file: 32 inputs, super-blocks 256. */
static int64_t file_block_bytes(int fmt) {
    static const int64_t bytes[] = {18, 20, 22, 24, 34, 144, 176, 210, 2, 2, 4};
    return bytes[fmt];
}

/* The 6-bit scale and minimum of sub-block j of a q4_k or q5_k super-block. */
static void scale_and_min(const uint8_t *s, int j, uint8_t *scale, uint8_t *min) {
    if (j < 4) {
        *scale = s[j] & 63;
        *min = s[j + 4] & 63;
    } else {
        *scale = (uint8_t)((s[j + 4] & 15) | s[j - 4] >> 6 << 4);
        *min = (uint8_t)((s[j + 4] >> 4) | s[j] >> 6 << 4);
    }
}

/* The stored bits of 32 inputs, one a byte; sub = number of the 32-block inside a super-block. */
static void file_bits(int fmt, const uint8_t *block, int sub, uint8_t q[BLOCK]) {
    switch (fmt) {
    case Q4_0: case Q4_1: case Q5_0: case Q5_1: {
        const uint8_t *qs = block + file_block_bytes(fmt) - 16;
        uint32_t high = 0;
        if (fmt == Q5_0 || fmt == Q5_1) memcpy(&high, qs - 4, 4);
        for (int i = 0; i < 16; i++) {
            q[i] = (uint8_t)((qs[i] & 15) | (high >> i & 1) << 4);
            q[i + 16] = (uint8_t)(qs[i] >> 4 | (high >> (i + 16) & 1) << 4);
        }
        return;
    }
    case Q8_0:
        memcpy(q, block + 2, BLOCK);
        return;
    case Q4_K: case Q5_K: {
        const uint8_t *qs = block + (fmt == Q4_K ? 16 : 48) + 32 * (sub / 2), *high = block + 16;
        for (int i = 0; i < BLOCK; i++) {
            q[i] = sub % 2 ? qs[i] >> 4 : qs[i] & 15;
            if (fmt == Q5_K) q[i] |= (uint8_t)((high[i] >> sub & 1) << 4);
        }
        return;
    }
    default: { /* q6_k: halves of 128; low bits of blocks 0, 1 in low nibbles, of 2, 3 in high ones */
        int half = sub / 4, part = sub % 4;
        const uint8_t *low = block + 64 * half + 32 * (part % 2), *high = block + 128 + 32 * half;
        for (int i = 0; i < BLOCK; i++)
            q[i] = (uint8_t)((part < 2 ? low[i] & 15 : low[i] >> 4) | (high[i] >> 2 * part & 3) << 4);
        return;
    }
    }
}

/* Put the bits of row r into a record. */
static void put_bits(int fmt, uint8_t *rec, int r, const uint8_t q[BLOCK]) {
    uint32_t word[GROUPS];
    memcpy(word, q, BLOCK);
    if (fmt == Q8_0) {
        for (int g = 0; g < GROUPS; g++) memcpy(rec + 64 * g + 4 * r, word + g, 4);
        return;
    }
    for (int p = 0; p < 4; p++) {
        uint32_t both = (word[2 * p] & 0x0F0F0F0F) | (word[2 * p + 1] & 0x0F0F0F0F) << 4;
        memcpy(rec + 64 * p + 4 * r, &both, 4);
    }
    if (fmt == Q5_0 || fmt == Q5_1 || fmt == Q5_K) {
        uint32_t high = 0;
        for (int g = 0; g < GROUPS; g++) high |= (word[g] >> 4 & 0x01010101) << g;
        memcpy(rec + 256 + 4 * r, &high, 4);
    } else if (fmt == Q6_K) {
        for (int h = 0; h < 2; h++) {
            uint32_t high = 0;
            for (int g = 0; g < 4; g++) high |= (word[4 * h + g] >> 4 & 0x03030303) << 2 * g;
            memcpy(rec + 256 + 64 * h + 4 * r, &high, 4);
        }
    }
}

/* One row of a block format into its panel. */
static void pack_blocks(int fmt, uint8_t *panel, int r, const uint8_t *row, int64_t k) {
    const int subs = format_is_super(fmt) ? SUPER : 1;
    const int64_t bytes = file_block_bytes(fmt);
    for (int64_t b = 0; b < k / BLOCK; b++) {
        const uint8_t *block = row + b / subs * bytes;
        uint8_t *rec = panel + record_at(fmt, b), *header = panel + header_at(fmt, b), *scales = rec + scale_offset(fmt);
        const int sub = (int)(b % subs);
        uint8_t q[BLOCK];
        file_bits(fmt, block, sub, q);
        put_bits(fmt, rec, r, q);
        if (fmt == Q4_K || fmt == Q5_K) {
            scale_and_min(block + 4, sub, scales + r, scales + 16 + r);
            if (sub == 0) {
                memcpy(header + 2 * r, block, 2);
                memcpy(header + 32 + 2 * r, block + 2, 2);
            }
        } else if (fmt == Q6_K) {
            scales[r] = block[192 + 2 * sub];
            scales[16 + r] = block[192 + 2 * sub + 1];
            if (sub == 0) memcpy(header + 2 * r, block + 208, 2);
        } else {
            memcpy(scales + 2 * r, block, 2);
            if (format_has_min(fmt)) memcpy(scales + 32 + 2 * r, block + 2, 2);
        }
    }
}

static void pack_dense(int fmt, uint8_t *panel, int r, const uint8_t *row, int64_t k) {
    if (fmt == F32)
        for (int64_t i = 0; i < k; i++) memcpy(panel + 64 * i + 4 * r, row + 4 * i, 4);
    else
        for (int64_t i = 0; i < k; i++) memcpy(panel + 32 * i + 2 * r, row + 2 * i, 2);
}

/* pack: 0 panels, 1 rows of the file, 2 N, 3 K, 4 bytes between rows, 5 format, 6 first row in the panels. Rows of the last
 * panel past the end are zeroed when `7` is set. The tiles share out whole panels. */
static int32_t pack(const arg *args, int32_t tile, int32_t tiles) {
    const int64_t n = args[2].i, k = args[3].i, stride = args[4].i, fmt = args[5].i, start = args[6].i;
    if (fmt < 0 || fmt >= NUM_FORMATS) return STATUS_FORMAT;
    if (n < 0 || k < 0 || start < 0) return STATUS_SHAPE;
    if (!format_is_dense((int)fmt) && k % (format_is_super((int)fmt) ? BLOCK * SUPER : BLOCK)) return STATUS_SHAPE;
    const int64_t size = panel_bytes((int)fmt, k), first = start / PANEL, panels = (start + n + PANEL - 1) / PANEL - first;
    static const uint8_t zeros[256];
    for (int64_t p = first + panels * tile / tiles; p < first + panels * (tile + 1) / tiles; p++) {
        uint8_t *panel = (uint8_t *)args[0].p + p * size;
        for (int r = 0; r < PANEL; r++) {
            const int64_t row = p * PANEL + r - start;
            if (row < 0) continue;
            if (row >= n) {
                if (!args[7].i) break;
                if (format_is_dense((int)fmt)) {
                    for (int64_t i = 0; i < k; i++) pack_dense((int)fmt, panel + i * record_bytes((int)fmt), r, zeros, 1);
                } else {
                    const int64_t step = format_is_super((int)fmt) ? BLOCK * SUPER : BLOCK;
                    const int64_t records = panel_bytes((int)fmt, step);
                    for (int64_t i = 0; i < k / step; i++) pack_blocks((int)fmt, panel + i * records, r, zeros, step);
                }
                continue;
            }
            const uint8_t *source = (const uint8_t *)args[1].p + row * stride;
            if (format_is_dense((int)fmt)) pack_dense((int)fmt, panel, r, source, k);
            else pack_blocks((int)fmt, panel, r, source, k);
        }
    }
    return STATUS_OK;
}

const kernel_entry metrale_kernels_host[] = {{"pack", pack}, {0, 0}};
