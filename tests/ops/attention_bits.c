/* Print a digest of what the attention and K/V kernels of one variant write, from the same numbers on every machine.
 * Compile with -DVARIANT=neon (say) beside that variant's attention_*.c; equal output means equal bits. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "abi.h"
#include "attention.h"

#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)
enum { ROWS = 24, BLOCKS = 24, MAX_DIM = 80, MAX_HEADS = 9 };

static uint64_t state = 88172645463325252ULL;
static float q[ROWS * MAX_HEADS * MAX_DIM], out[ROWS * MAX_HEADS * MAX_DIM];
static float k[(BLOCKS + 1) * 3 * MAX_DIM * 16], v[(BLOCKS + 1) * 3 * MAX_DIM * 16];
static float new_k[ROWS * 3 * MAX_DIM], table[512 * MAX_DIM], weight[MAX_DIM];
static float partial[ROWS * MAX_HEADS * 2 * (2 + MAX_DIM)];
static int32_t counters[ROWS * 3], seq[ROWS], place[ROWS], tables[2 * BLOCKS];

static float uniform(void) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (float)(int32_t)(state >> 32) * 0x1p-31f;
}

static void fill(float *x, size_t n) {
    for (size_t i = 0; i < n; i++) x[i] = uniform();
}

static uint64_t digest(const void *data, size_t n) {
    uint64_t h = 1469598103934665603ULL;
    for (size_t i = 0; i < n; i++) h = (h ^ ((const uint8_t *)data)[i]) * 1099511628211ULL;
    return h;
}

static int finish(int heads, int kv, int dim, int full) {
    arg a[25] = {{q}, {.i = heads * dim}, {new_k}, {.i = kv * dim}, {new_k}, {.i = kv * dim}, {.i = ROWS}, {.i = heads}, {.i = kv},
                 {.i = dim}, {weight}, {weight}, {.f = 1e-5}, {.f = 1.0}, {.i = full}, {table}, {.i = dim / 2 * 2}, {place},
                 {.i = 512}, {k}, {v}, {seq}, {place}, {tables}, {.i = BLOCKS}};
    if (full) a[10].p = a[11].p = 0;
    return JOIN(qkv_finish, VARIANT)(a, 0, 1);
}

static int attend(int heads, int kv, int dim, int window, double cap, int slots) {
    int rows = slots ? 1 : 5, tiles = slots ? ROWS * kv * slots : (ROWS + rows - 1) / rows * kv, status = 0;
    arg a[21] = {{out}, {.i = heads * dim}, {q}, {.i = heads * dim}, {k}, {v}, {seq}, {place}, {tables}, {.i = BLOCKS},
                 {.i = ROWS}, {.i = heads}, {.i = kv}, {.i = dim}, {.i = rows}, {.i = slots}, {partial}, {counters}, {.f = 0.37},
                 {.i = window}, {.f = cap}};
    for (int tile = 0; tile < tiles; tile++) status |= JOIN(attention, VARIANT)(a, tile, tiles);
    return status;
}

int main(void) {
    static const int SHAPES[][3] = {{9, 3, 64}, {4, 1, 20}, {3, 3, 80}, {6, 2, 5}};
    for (int b = 0; b < BLOCKS; b++) tables[b] = BLOCKS - b, tables[BLOCKS + b] = 1 + b;
    for (int t = 0; t < ROWS; t++) seq[t] = t < 10 ? 0 : t < 20 ? 1 : -1, place[t] = t < 10 ? 370 + t : t < 20 ? 29 * (t - 10) : 0;
    fill(table, sizeof table / 4);
    fill(weight, MAX_DIM);
    for (size_t s = 0; s < sizeof SHAPES / sizeof SHAPES[0]; s++)
        for (int mode = 0; mode < 4; mode++) {
            int heads = SHAPES[s][0], kv = SHAPES[s][1], dim = SHAPES[s][2];
            fill(q, sizeof q / 4);
            fill(k, sizeof k / 4);
            fill(v, sizeof v / 4);
            fill(new_k, sizeof new_k / 4);
            int status = finish(heads, kv, dim, mode & 1);
            status |= attend(heads, kv, dim, mode & 1 ? 301 : 0, mode & 2 ? 3.0 : 0.0, mode == 3 ? 2 : 0);
            if (status) return status;
            printf("%d %d %d %d %016llx %016llx %016llx\n", heads, kv, dim, mode,
                   (unsigned long long)digest(out, (size_t)(ROWS * heads * dim) * 4), (unsigned long long)digest(k, sizeof k),
                   (unsigned long long)digest(q, sizeof q));
        }
    return 0;
}
