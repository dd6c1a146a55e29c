/* Print a digest of what every kernel of one variant writes, from the same numbers on every machine:
 *
 *     variant_bits VARIANT
 *
 * Equal output of two variants means equal bits. Compiled for another architecture and run under an emulator, or copied
 * to a machine with other instruction sets, it needs nothing but itself. Exit 2: the machine does not run the variant. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "abi.h"
#include "formats.h"

enum { MAX_T = 70, MAX_K = 1792, MAX_N = 64, GUARD = 64 };
static const char *NAMES[] = {"q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k", "f16", "bf16", "f32"};
static const char *variant;
static uint64_t state = 88172645463325252ULL;

static uint32_t draw(void) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (uint32_t)(state >> 32);
}

static float uniform(void) { return (float)(int32_t)draw() * 0x1p-31f; }

/* An f16 between 2^-9 and 2^-7, of either sign when asked. */
static uint16_t draw_half(int sign) { return (uint16_t)(0x1800 + (draw() & 0x7FF) + (sign && draw() % 2 ? 0x8000 : 0)); }

static uint64_t digest_bytes(const void *p, size_t n) {
    uint64_t h = 1469598103934665603ULL;
    for (size_t i = 0; i < n; i++) h = (h ^ ((const uint8_t *)p)[i]) * 1099511628211ULL;
    return h;
}

/* NaN counts as one value. */
static uint64_t digest_floats(const float *p, size_t n) {
    uint64_t h = 1469598103934665603ULL;
    for (size_t i = 0; i < n; i++) h = (h ^ (isnan(p[i]) ? 0x7FC00000u : float_to_bits(p[i]))) * 1099511628211ULL;
    return h;
}

static void run(const char *name, const arg *args, int32_t tiles) {
    kernel_fn fn = metrale_kernel(variant, name);
    if (!fn) exit(3);
    for (int32_t i = tiles - 1; i >= 0; i--) {
        int32_t status = fn(args, i, tiles);
        if (status) {
            printf("%s: status %d\n", name, status);
            exit(4);
        }
    }
}

/* Rows of a file with scales of ordinary size and arbitrary bits. */
static void fill_file(int fmt, uint8_t *rows, int64_t n, int64_t k) {
    static const int bytes[] = {18, 20, 22, 24, 34, 144, 176, 210};
    if (format_is_dense(fmt)) {
        for (int64_t i = 0; i < n * k; i++) {
            float v = uniform() * 0.05f;
            uint16_t half = draw_half(1), bf = (uint16_t)(float_to_bits(v) >> 16);
            if (fmt == F32) memcpy(rows + 4 * i, &v, 4);
            else memcpy(rows + 2 * i, fmt == F16 ? &half : &bf, 2);
        }
        return;
    }
    int64_t blocks = n * k / (format_is_super(fmt) ? 256 : 32);
    for (int64_t b = 0; b < blocks; b++) {
        uint8_t *block = rows + b * bytes[fmt];
        for (int i = 0; i < bytes[fmt]; i++) block[i] = (uint8_t)draw();
        uint16_t d = draw_half(0), m = draw_half(1);
        memcpy(block + (fmt == Q6_K ? 208 : 0), &d, 2);
        if (format_has_min(fmt)) memcpy(block + 2, &m, 2);
    }
}

static int64_t file_row_bytes(int fmt, int64_t k) {
    static const int bytes[] = {18, 20, 22, 24, 34, 144, 176, 210};
    if (format_is_dense(fmt)) return k * (fmt == F32 ? 4 : 2);
    return k / (format_is_super(fmt) ? 256 : 32) * bytes[fmt];
}

static uint8_t *file, *panels, *more;
static float *x, *out, *residual, *bias;
static int8_t *q, *oq;
static float *qs, *os;
static int16_t *qsum, *osum;

static void pack_matrix(int fmt, uint8_t *to, int64_t n, int64_t k) {
    fill_file(fmt, file, n, k);
    arg args[] = {{.p = to}, {.p = file}, {.i = n}, {.i = k}, {.i = file_row_bytes(fmt, k)}, {.i = fmt}, {.i = 0}, {.i = 1}};
    if (metrale_kernel("host", "pack")(args, 0, 1)) exit(5);
}

static int32_t tile_count(int64_t t, int64_t n, int64_t across, int64_t down) {
    int64_t panels_of_n = (n + 15) / 16;
    return (int32_t)((panels_of_n + across - 1) / across * ((t + down - 1) / down));
}

static void products(int fmt, int64_t t, int64_t n, int64_t k) {
    memset(out, 0xFF, sizeof(float) * MAX_T * MAX_N);
    for (int q8 = !format_is_dense(fmt); q8 >= 0; q8--) {
        arg args[] = {{.p = out}, {.p = q8 ? (void *)q : x}, {.i = k}, {.p = qsum}, {.p = panels}, {.p = bias}, {.p = residual},
                      {.i = t}, {.i = n}, {.i = k}, {.i = MAX_N}, {.i = MAX_N}, {.i = fmt}, {.i = 2}, {.i = 13}, {.f = 0.75}};
        if (q8) args[2].p = qs;
        run(q8 ? "linear_q" : "linear_f", args, tile_count(t, n, 2, 13));
        printf("%s %s T=%d N=%d K=%d %016llx\n", q8 ? "linear_q" : "linear_f", NAMES[fmt], (int)t, (int)n, (int)k,
               (unsigned long long)digest_floats(out, (size_t)(t * MAX_N)));
    }
}

static void gates(int fmt, int up_fmt, int64_t t, int64_t k, int act) {
    for (int q8 = !format_is_dense(fmt) && !format_is_dense(up_fmt); q8 >= 0; q8--) {
        for (int quantized = 0; quantized < 2; quantized++) {
            int64_t n = quantized ? 64 : 37;
            memset(out, 0xFF, sizeof(float) * MAX_T * MAX_N);
            arg args[] = {{.p = quantized ? 0 : out}, {.p = q8 ? (void *)q : x}, {.i = k}, {.p = qsum}, {.p = panels}, {.p = more},
                          {.p = bias}, {.p = bias + 64}, {.p = oq}, {.p = os}, {.p = osum}, {.i = t}, {.i = n}, {.i = k},
                          {.i = MAX_N}, {.i = fmt}, {.i = up_fmt}, {.i = act}, {.i = 2}, {.i = 64}};
            if (q8) args[2].p = qs;
            run(q8 ? "mlp_up_q" : "mlp_up_f", args, tile_count(t, n, 2, 64));
            uint64_t h = digest_floats(out, (size_t)(t * MAX_N));
            if (quantized)
                h = digest_bytes(oq, (size_t)(t * n)) ^ digest_floats(os, (size_t)(t * n / 32)) ^ digest_bytes(osum, (size_t)(t * n / 8));
            printf("%s %s %s T=%d K=%d %016llx\n", q8 ? "mlp_up_q" : "mlp_up_f", NAMES[fmt], NAMES[up_fmt], (int)t, (int)k,
                   (unsigned long long)h);
        }
    }
}

static void rows_of(int64_t t, int64_t k) {
    static const float odd[] = {NAN, INFINITY, 1e-39f, 3e38f, 0.0f};
    for (int64_t i = 0; i < t * k; i++) x[i] = uniform() * (i / k % 3 ? 1.0f : 30.0f);
    if (t > 5) /* some rows with what must not crash */
        for (int i = 0; i < 5; i++) x[(i + 1) * k + 3 + i] = odd[i];
    arg args[] = {{.p = q}, {.p = qs}, {.p = qsum}, {.p = x}, {.i = t}, {.i = k}, {.i = k}};
    run("quantize", args, 3);
    printf("quantize T=%d K=%d %016llx %016llx %016llx\n", (int)t, (int)k, (unsigned long long)digest_bytes(q, (size_t)(t * k)),
           (unsigned long long)digest_floats(qs, (size_t)(t * k / 32)), (unsigned long long)digest_bytes(qsum, (size_t)(t * k / 8)));
}

static void elementwise(void) {
    int64_t width = 1001;
    for (int act = 0; act < 2; act++) {
        for (int64_t i = 0; i < 2 * width; i++) x[i] = i < width ? (float)(i - 500) * 0.217f : uniform();
        x[0] = NAN;
        x[1] = INFINITY;
        x[2] = -INFINITY;
        x[3] = 3e38f;
        arg args[] = {{.p = out}, {.p = 0}, {.p = 0}, {.p = 0}, {.p = x}, {.p = x + width}, {.i = 1}, {.i = width}, {.i = 2 * width},
                      {.i = width}, {.i = act}};
        run("act_mul", args, 1);
        printf("act_mul %d %016llx\n", act, (unsigned long long)digest_floats(out, (size_t)width));
    }
}

static void *room(size_t bytes) {
    void *p = aligned_alloc(64, (bytes + GUARD + 63) / 64 * 64);
    if (!p) exit(6);
    memset(p, 0xFF, bytes);
    return p;
}

int main(int argc, char **argv) {
    static const int64_t rows[] = {1, 2, 3, 5, 17, 70}, sizes[] = {256, 1792};
    variant = argc > 1 ? argv[1] : "generic";
    if (metrale_variant_supported(variant) != 1) return 2;
    file = room(4 * MAX_K * MAX_N), panels = room(5 * MAX_K * MAX_N), more = room(5 * MAX_K * MAX_N);
    x = room(4 * MAX_T * MAX_K), out = room(4 * MAX_T * MAX_N + 8192), residual = room(4 * MAX_T * MAX_N), bias = room(512);
    q = room(MAX_T * MAX_K), qs = room(MAX_T * MAX_K / 8), qsum = room(MAX_T * MAX_K / 8);
    oq = room(MAX_T * MAX_N), os = room(MAX_T * MAX_N / 8), osum = room(MAX_T * MAX_N / 8);
    for (int i = 0; i < MAX_T * MAX_N; i++) residual[i] = uniform();
    for (int i = 0; i < 128; i++) bias[i] = uniform();
    elementwise();
    for (int s = 0; s < 2; s++) {
        for (int r = 0; r < 6; r++) {
            rows_of(rows[r], sizes[s]);
            for (int fmt = 0; fmt < NUM_FORMATS; fmt++) {
                pack_matrix(fmt, panels, 37, sizes[s]);
                products(fmt, rows[r], 37, sizes[s]);
                pack_matrix(fmt, panels, 64, sizes[s]);
                int up_fmt = fmt % 3 ? fmt : (fmt + 1) % NUM_FORMATS;
                pack_matrix(up_fmt, more, 64, sizes[s]);
                if (r % 2) gates(fmt, up_fmt, rows[r], sizes[s], fmt % 2);
            }
        }
    }
    for (int fmt = 0; fmt < NUM_FORMATS; fmt++) {
        static const int32_t ids[] = {36, 0, 17, 17, 16, 15};
        pack_matrix(fmt, panels, 37, 768);
        arg args[] = {{.p = x}, {.p = (void *)ids}, {.p = panels}, {.i = 6}, {.i = 37}, {.i = 768}, {.i = 768}, {.i = fmt},
                      {.f = 1.5}, {.i = 0}, {.i = 37}};
        run("embed", args, 2);
        printf("embed %s %016llx\n", NAMES[fmt], (unsigned long long)digest_floats(x, 6 * 768));
    }
    return 0;
}
